"""`varve cache`: look into, check and flush the cache of a running server, check a disk cache directory offline, or
whether a model caches right."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from serve import cache_operations
from serve.cache_operations import CacheOperationError
from serve.cache_report import part_of
from serve.cache_tables import format_flush, format_pages, format_stats
from serve.cli_parser import LineParser, parse_line
from serve.errors import ConfigError, UserError
from serve.units import format_bytes

Answer = TypeVar("Answer")

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "VARVE_ADMIN_API_KEY"
HTTP_TIMEOUT_S = 120.0
_SECTIONS = {
    "stats": "Pages, bytes, hits and failures of every tier.",
    "ls": "Pages of the host, most recently used first.",
    "check": "Check the books of a running server, or, with --disk_cache_dir, a directory that no server uses.",
    "flush": "Flush all tiers: once it is done, no page of before is hit.",
    "validate": "Check that a model's states come back from every tier as they were, and that none is missed.",
}
_EPILOG = (
    "A running server is asked over HTTP (--base_url, with the server's --admin_api_key), or, on the same machine, "
    "through its --run_dir. "
    "Exit codes: 0 all is well; 1 problems were found, or it could not be done; 2 a flag is wrong."
)


class CacheError(UserError):
    """The server refuses, or is away."""


class Connection(Protocol):
    """A running server's cache. All methods raise CacheError."""

    def stats(self) -> dict[str, Any]: ...
    def list_pages(self, limit: int, salt: str | None) -> list[dict[str, Any]]: ...
    def check(self) -> dict[str, list[str]]: ...
    def flush(self, salt: str | None) -> dict[str, int]: ...


def run(words: Sequence[str]) -> int:
    """`varve cache WORDS`. Gives the exit code."""
    chooser = LineParser("varve cache", "Operate the cache of a server.")
    lines = "; ".join(f"{name}: {text[0].lower()}{text[1:-1]}" for name, text in _SECTIONS.items())
    chooser.add_argument("command", choices=tuple(_SECTIONS), help=f"{lines}. varve cache COMMAND --help tells more")
    command = parse_line(chooser, words[:1]).command
    options = parse_line(_parser(command), words[1:])
    return _COMMANDS[command](options)


def _parser(command: str) -> LineParser:
    parser = LineParser(f"varve cache {command}", _SECTIONS[command])
    if command == "validate":
        return _validate_parser(parser)
    parser.epilog = _EPILOG
    parser.add_argument("--base_url", metavar="URL", help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--admin_api_key", metavar="TEXT", help=f"the server's admin key (default: ${KEY_VARIABLE})")
    parser.add_argument("--run_dir", metavar="PATH", help="ask through the sockets in the server's --run_dir instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    if command == "ls":
        parser.add_argument("--limit", type=int, default=20, metavar="N", help="pages at most (default: 20)")
    if command in ("ls", "flush"):
        parser.add_argument("--salt", metavar="TEXT", help="only pages of requests with this cache_salt")
    if command == "check":
        parser.add_argument("--disk_cache_dir", metavar="PATH", help="check this directory; no server may use it")
        parser.add_argument("--fix", action="store_true", help="delete what is damaged (with --disk_cache_dir)")
    return parser


def _validate_parser(parser: LineParser) -> LineParser:
    parser.epilog = (
        "States are snapshot and restored in this process, each is dropped in turn, and a server is started twice: it "
        "must hit on the device, in CPU memory, and after its restart on disk, with the text of a miss. "
        "Exit codes: 0 all is well; 1 a check failed, or it could not be done; 2 a flag is wrong."
    )
    parser.add_argument("model", metavar="MODEL", help="as for varve serve")
    parser.add_argument("--data_type", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--load_format", default="auto", metavar="TEXT", help="as for varve serve")
    parser.add_argument(
        "--cpu_cache_token_page_size",
        type=int,
        default=64,
        metavar="N",
        help="tokens a page (default: 64), raised to whole rows of the model's states",
    )
    parser.add_argument("--states_only", action="store_true", help="start no server: check what one process can")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


# --- connections ------------------------------------------------------------------------------------------------------


def _connect(options: argparse.Namespace) -> Connection:
    if options.run_dir is None:
        return HttpConnection(
            options.base_url or DEFAULT_URL, options.admin_api_key or os.environ.get(KEY_VARIABLE) or ""
        )
    if options.base_url is not None or options.admin_api_key is not None:
        raise ConfigError("--run_dir needs neither --base_url nor --admin_api_key")
    return RunDirConnection(Path(options.run_dir).expanduser())


class RunDirConnection:
    """Through the control sockets of a server on this machine."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError when no server runs there."""
        if not (run_dir / f"{cache_operations.ROUTER}.sock").exists():
            raise ConfigError(f"--run_dir {run_dir}: no server runs there")
        self._ask = cache_operations.ask_in(run_dir)

    def stats(self) -> dict[str, Any]:
        return self._told(lambda: cache_operations.stats(self._ask))

    def list_pages(self, limit: int, salt: str | None) -> list[dict[str, Any]]:
        return self._told(lambda: cache_operations.list_pages(self._ask, limit, salt))

    def check(self) -> dict[str, list[str]]:
        return self._told(lambda: cache_operations.check(self._ask))

    def flush(self, salt: str | None) -> dict[str, int]:
        return self._told(lambda: cache_operations.flush(self._ask, salt))

    @staticmethod
    def _told(operation: Callable[[], Answer]) -> Answer:
        try:
            return operation()
        except CacheOperationError as error:
            raise CacheError(str(error)) from error


class HttpConnection:
    """Through the admin routes."""

    def __init__(self, base_url: str, key: str) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def stats(self) -> dict[str, Any]:
        return self._call("GET", "/cache/stats")

    def list_pages(self, limit: int, salt: str | None) -> list[dict[str, Any]]:
        query: dict[str, Any] = {"limit": limit} if salt is None else {"limit": limit, "cache_salt": salt}
        return list(self._call("GET", "/cache/ls", params=query)["pages"])

    def check(self) -> dict[str, list[str]]:
        return dict(self._call("POST", "/cache/check")["problems"])

    def flush(self, salt: str | None) -> dict[str, int]:
        return self._call("POST", "/flush_cache", json={} if salt is None else {"cache_salt": salt})

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        import httpx

        url = self._base_url + path
        try:
            response = httpx.request(method, url, headers=self._headers, timeout=HTTP_TIMEOUT_S, **options)
            body = response.json()
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ConfigError(f"--base_url {self._base_url}: {error}") from error
        except httpx.HTTPError as error:
            raise CacheError(f"{self._base_url} does not answer: {error}") from error
        except ValueError as error:
            raise CacheError(f"{url} answered {response.status_code}, and no JSON: is it a Varve server?") from error
        if response.status_code == 200 and isinstance(body, dict):
            return body
        reason = part_of(body, "error").get("message") or part_of(body).get("detail") or "no reason"
        raise CacheError(f"{url} answered {response.status_code}: {reason}")


# --- commands ---------------------------------------------------------------------------------------------------------


def _stats(options: argparse.Namespace) -> int:
    found = _connect(options).stats()
    print(_as_json(found) if options.json else format_stats(found))
    return 0


def _ls(options: argparse.Namespace) -> int:
    if not 0 <= options.limit <= 1000:
        raise ConfigError(f"--limit {options.limit}: should be between 0 and 1000")
    pages = _connect(options).list_pages(options.limit, options.salt)
    print(_as_json(pages) if options.json else format_pages(pages))
    return 0


def _flush(options: argparse.Namespace) -> int:
    dropped = _connect(options).flush(options.salt)
    print(_as_json(dropped) if options.json else format_flush(dropped))
    return 0


def _check(options: argparse.Namespace) -> int:
    if options.disk_cache_dir is not None:
        return _check_directory(options)
    if options.fix:
        raise ConfigError("--fix needs --disk_cache_dir: the books of a running server are never changed")
    problems = _connect(options).check()
    if options.json:
        print(_as_json(problems))
    elif not any(problems.values()):
        print("no problems")
    else:
        print("\n".join(f"{part}: {line}" for part, lines in problems.items() for line in lines))
    return 1 if any(problems.values()) else 0


def _check_directory(options: argparse.Namespace) -> int:
    if options.run_dir is not None or options.base_url is not None:
        raise ConfigError("--disk_cache_dir is checked without a server: leave --run_dir and --base_url out")
    from serve.multi_level_cache.disk_check import check_directory
    from serve.multi_level_cache.disk_directory import DiskDirectoryError

    try:
        report = check_directory(Path(options.disk_cache_dir).expanduser(), options.fix)
    except DiskDirectoryError as error:
        raise CacheError(str(error)) from error
    problems = [{"text": problem.text, "is_fixed": problem.is_fixed} for problem in report.problems]
    if options.json:
        counts = {name: value for name, value in vars(report).items() if name.startswith("num_")}
        print(_as_json({**counts, "problems": problems}))
    else:
        print("\n".join(f"{'fixed: ' if each['is_fixed'] else ''}{each['text']}" for each in problems) or "no problems")
        checked = (
            f"{report.num_objects} objects in {report.num_segments} segments, {format_bytes(report.num_bytes)} read"
        )
        print(f"{checked}; {report.num_unknown} of an unknown format" if report.num_unknown else checked)
    return 1 if report.num_unfixed else 0


def _validate(options: argparse.Namespace) -> int:
    if not 16 <= options.cpu_cache_token_page_size <= 256 or options.cpu_cache_token_page_size % 16:
        raise ConfigError("--cpu_cache_token_page_size should be a multiple of 16 between 16 and 256")
    from serve.validate.command import run as validate

    return validate(options)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "stats": _stats,
    "ls": _ls,
    "check": _check,
    "flush": _flush,
    "validate": _validate,
}


def _as_json(data: Any) -> str:
    return json.dumps(data, indent=1)
