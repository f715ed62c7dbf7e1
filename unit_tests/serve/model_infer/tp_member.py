"""One rank of the tests of tensor parallelism: `python -m unit_tests.serve.model_infer.tp_member RANK DIR`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from models.parallel import TensorParallel
from serve.model_infer.tp_group import DistributedGroup, join_group, smallest
from unit_tests.serve.model_infer.builders import CPU, FakeTable, greedy
from unit_tests.serve.model_infer.tiny_llama import Driver, make_runner, random_prompt


def collectives(group: TensorParallel) -> dict[str, Any]:
    rank = group.rank
    summed = group.all_reduce(torch.full((2, 3), float(rank + 1), dtype=torch.bfloat16))
    width = 3 - rank
    gathered = group.all_gather_columns(torch.full((2, width), float(rank)), [3, 2])
    told = group.broadcast(torch.tensor([rank, rank + 5]), source=1)
    return {
        "summed": summed.tolist(),
        "gathered": gathered.tolist(),
        "told": told.tolist(),
        "smallest": smallest(group, 10 - rank, CPU),
    }


def texts(group: TensorParallel, directory: Path) -> dict[str, Any]:
    table = FakeTable(num_tokens=512)
    driver = Driver(make_runner(table, group, directory), table)
    driver.join(0, 0, random_prompt(20, 1))
    driver.join(1, 1, random_prompt(9, 2), greedy(temperature=0.7, seed=3, top_k=50))
    first = driver.run({0: 7, 1: 9})
    driver.outputs[1] = driver.outputs[1] or [0]  # ranks other than 0 are not told tokens
    driver.run({0: 13})
    driver.outputs[0] = driver.outputs[0] or [0]
    for _ in range(20):
        for slot in (0, 1):
            known = driver.lengths[slot] + 1 - len(driver.prompts[slot])
            driver.outputs[slot] += [0] * (known - len(driver.outputs[slot]))
        driver.run()
    last = driver.runner.batch.last_tokens.tolist()
    return {"texts": driver.outputs, "rank": first.rank, "rows": first.rows, "last": last}


def main() -> None:
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    group = join_group(rank, 2, CPU, directory / "tp.store", 60)
    print(json.dumps({"collectives": collectives(group), "texts": texts(group, directory)}))
    if isinstance(group, DistributedGroup):
        group.close()


if __name__ == "__main__":
    main()
