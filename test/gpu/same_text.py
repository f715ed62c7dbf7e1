"""A model in float32 must give the same greedy tokens on the GPU as on the CPU, through the whole server.

`python test/gpu/same_text.py [FLAGS]` serves a small llama of random weights; FLAGS go to the server on the GPU
(`--tp 2`). Each request is sent twice: the second one hits the prefix cache and must not differ either.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 0,
    "bos_token_id": 1,
}
PROMPTS = [[5], list(range(2, 66)), list(range(2, 67)), [7, 11] * 100, list(range(3, 500)), [9, 8, 7] * 400]


def answers(model: str, device: str, flags: list[str], port: int) -> list[list[int]]:
    """Generated ids of all prompts, sent together, twice."""
    command = [sys.executable, "-m", "serve.cli", "serve", model, "--port", str(port), "--device", device, *flags]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ)
        try:
            return ask(f"http://127.0.0.1:{port}", server)
        except Exception:
            log.seek(0)
            print(log.read().decode()[-6000:])
            raise
        finally:
            server.terminate()
            server.wait(60)


def ask(url: str, server: subprocess.Popen[bytes]) -> list[list[int]]:
    end = time.monotonic() + 120
    with httpx.Client(base_url=url, timeout=120) as client:
        while True:
            try:
                if client.get("/readiness").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server did not start")
            time.sleep(0.2)
        name = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": name, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        found = []
        for _ in range(2):
            response = client.post("/v1/completions", json=body | {"prompt": PROMPTS})
            response.raise_for_status()
            found += [choice["token_ids"] for choice in response.json()["choices"]]
        return found


def main() -> int:
    flags = ["--data_type", "float32", "--load_format", "dummy"]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        cpu = answers(directory, "cpu", flags, 8451)
        cuda = answers(directory, "cuda", flags + sys.argv[1:], 8452)
    for number, (expected, found) in enumerate(zip(cpu, cuda, strict=True)):
        same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), len(expected))
        print(f"answer {number}: {same} of {len(expected)} tokens equal")
    print(f"hit equals miss on the GPU: {cuda[: len(PROMPTS)] == cuda[len(PROMPTS) :]}")
    return 0 if cpu == cuda else 1


if __name__ == "__main__":
    sys.exit(main())
