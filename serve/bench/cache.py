"""`varve bench cache`: what each tier gains, as hit rate and time to first token, on servers of its own."""

import argparse
import asyncio
import sys

from serve.bench.arrivals import Arrival
from serve.bench.cache_figures import Figures, as_plain_data, format_results, make_figures
from serve.bench.cache_options import CacheBenchOptions, Setup
from serve.bench.cache_paired import PAIRED_SIZES, format_rows, run_paired
from serve.bench.cache_plot import save_cache_plot
from serve.bench.cache_server import running_server
from serve.bench.client import CompletionClient
from serve.bench.flags import BenchError, add_option_flags, given_values, resolve_options
from serve.bench.lengths import LengthRange
from serve.bench.options import PromptFormat, ServeBenchOptions, WorkloadKind
from serve.bench.own_server import BenchServer
from serve.bench.prompts import prompt_maker
from serve.bench.report import write_json
from serve.bench.runner import play
from serve.bench.workload import Conversation, Stream, build_warmup, build_workload, random_stream
from serve.cache_operations import CacheOperationError, ask_in, flush


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `varve bench cache`."""
    add_option_flags(parser, CacheBenchOptions)


def main(args: argparse.Namespace) -> int:
    """Run the benchmark. 0: all requests were answered; 1: some failed. BenchError when it cannot run."""
    given = given_values(args, CacheBenchOptions)
    options = resolve_options(CacheBenchOptions, given)
    if options.paired:
        return _run_paired(resolve_options(CacheBenchOptions, given, PAIRED_SIZES))
    results = {setup.value: _run_setup(options, setup) for setup in options.setups}
    print(format_results(results))
    if options.json_file is not None:
        shown = options.model_dump(mode="json", by_alias=True)
        write_json(options.json_file, {"options": shown, "results": as_plain_data(results)})
    if options.plot is not None:
        title = f"{options.model}: {options.prefix_len} tokens a prefix, {options.device_tokens} on the device"
        try:
            save_cache_plot(options.plot, title, results)
        except OSError as error:
            raise BenchError(f"--plot {options.plot}: {error.strerror}") from error
    return 1 if any(each.num_failed for figures in results.values() for each in figures) else 0


def _run_paired(options: CacheBenchOptions) -> int:
    rows = run_paired(options)
    print(format_rows(rows))
    if options.json_file is not None:
        shown = options.model_dump(mode="json", by_alias=True)
        write_json(options.json_file, {"options": shown, "rows": [row.as_data() for row in rows]})
    return 0


def _run_setup(options: CacheBenchOptions, setup: Setup) -> list[Figures]:
    """All working sets on one server, which starts each with empty tiers."""
    with running_server(options, setup) as server:
        figures = []
        for number, working_set in enumerate(options.working_sets):
            print(f"{setup.value}: {working_set} prefixes", file=sys.stderr, flush=True)
            _flush(server)
            figures.append(asyncio.run(_run_set(options, server, working_set, number)))
        return figures


def _flush(server: BenchServer) -> None:
    try:
        flush(ask_in(server.run_dir))
    except CacheOperationError as error:
        raise BenchError(f"the cache cannot be flushed: {error}") from error


async def _run_set(options: CacheBenchOptions, server: BenchServer, working_set: int, number: int) -> Figures:
    """Every prefix once, then `rounds` times more in an order of its own each time."""
    serve_options = client_options(options, server.base_url, working_set)
    client = CompletionClient(serve_options)
    await client.resolve_model()
    maker = prompt_maker(True, options.vocab_size, None)
    workload = build_workload(serve_options, maker, options.seed, number)
    if number == 0:
        warmup = build_warmup(serve_options, maker, workload[0].turns[0], options.seed)
        await play(client, warmup, serve_options.endpoint, 1, lambda record: None)
    cold = await play(client, workload[:working_set], serve_options.endpoint, options.concurrency, lambda record: None)
    order = shuffled_rounds(workload[working_set:], working_set, options.seed, number)
    again = await play(client, order, serve_options.endpoint, options.concurrency, lambda record: None)
    return make_figures(working_set, cold, again)


def client_options(options: CacheBenchOptions, base_url: str, working_set: int) -> ServeBenchOptions:
    """Request i has prefix i modulo the working set, and a suffix that no other has."""
    return ServeBenchOptions(
        base_url=base_url,
        workload=WorkloadKind.SHARED_PREFIX,
        num_requests=working_set * (1 + options.rounds),
        num_prefixes=working_set,
        prefix_len=options.prefix_len,
        input_len=LengthRange(options.suffix_len, options.suffix_len),
        output_len=LengthRange(options.output_len, options.output_len),
        prompt_format=PromptFormat.TOKEN_IDS,
        vocab_size=options.vocab_size,
        arrival=Arrival.ALL_AT_ONCE,
        num_warmups=1,
        timeout=options.timeout,
    )


def shuffled_rounds(requests: list[Conversation], size: int, seed: int, number: int) -> list[Conversation]:
    """Rounds of `size` requests, each shuffled: in a fixed order LRU would find all of a set or nothing."""
    rng = random_stream(seed, number, Stream.ARRIVAL)
    rounds = [requests[start : start + size] for start in range(0, len(requests), size)]
    return [one[index] for one in rounds for index in rng.permutation(len(one))]
