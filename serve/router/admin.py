"""The router's control methods: plain data about itself, flush, pause and resume."""

from collections.abc import Callable
from typing import Any

from serve.router.request import Request
from serve.router.router import Router
from serve.types import RequestStatus

MAX_QUIET_S = 60.0


class RouterAdmin:
    """What `control-router` exposes. Called on the router's thread, between turns."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Control methods by name."""
        return {
            "status": self.status,
            "statistics": self.statistics,
            "list": self.list_requests,
            "check": self.check,
            "flush": self.flush,
            "open_tiers": self.open_tiers,
            "root": self.root,
            "pause": self.pause,
            "resume": self.resume,
        }

    def status(self) -> dict[str, Any]:
        """Whether the engine is up, whether new requests are admitted, and how many are where."""
        engine = self._router.engine
        counts = dict.fromkeys((status.value for status in RequestStatus), 0)
        for request in self._router.requests.values():
            counts[request.status.value] += 1
        return {
            "is_up": engine is not None,
            "is_admitting": engine is not None and engine.planner.is_admitting,
            "num_requests": len(self._router.requests),
            "num_waiting": len(engine.queue) if engine is not None else 0,
            "num_running": len(engine.batch) if engine is not None else 0,
            "num_plans_in_flight": len(engine.pipeline) if engine is not None else 0,
            "by_status": counts,
        }

    def statistics(self) -> dict[str, Any]:
        """Counters since start, gauges of now, and pages by group."""
        engine = self._router.engine
        result = {**self._router.statistics.snapshot(), **self.status(), "pages": {}}
        if engine is None:
            return result
        now = self._router.now()
        result["prefill_tokens_per_s"] = engine.costs.prefill_tokens_per_s(now)
        result["decode_step_s"] = engine.costs.decode_step_s(now)
        result["load_bytes_per_s"] = engine.costs.load_bytes_per_s(now)
        result["promotion_bytes_per_s"] = engine.costs.promotion_bytes_per_s(now)
        result["jobs_in_flight"] = len(engine.tiers.jobs)
        result["pages_held_by_jobs"] = engine.tiers.jobs.num_pages
        result["loads_in_progress"] = len(engine.tiers.loader)
        result["expected_output_fraction"] = engine.admission.estimate.fraction
        for name, group in engine.ledger.groups.items():
            result["pages"][name] = {
                "total": group.num_pages,
                "free": group.num_free,
                "used": group.num_used,
                "cached": group.num_cached,
                "evicted": group.num_evicted,
                "page_bytes": engine.facts.page_bytes.get(name, 0),
            }
        return result

    def list_requests(self) -> list[dict[str, Any]]:
        """One entry a living request, oldest first."""
        now = self._router.now()
        requests = sorted(self._router.requests.values(), key=lambda request: request.order)
        return [_describe(request, now) for request in requests]

    def check(self) -> dict[str, Any]:
        """Problems of the ledger's books; an idle router without jobs must also hold no page."""
        engine = self._router.engine
        if engine is None:
            return {"problems": []}
        problems = engine.ledger.check_integrity()
        if not self._router.has_work() and not len(engine.tiers.jobs):
            for name, group in engine.ledger.groups.items():
                if group.num_used:
                    problems.append(f"group {name}: {group.num_used} pages are used although nothing runs")
        return {"problems": problems}

    def flush(self, quiet_s: float = 0.0, root: str | None = None) -> dict[str, int] | None:
        """Drop all cached pages of the device, or those under a root (hex); those in use go when their requests end.

        quiet_s: for so long nothing is loaded from, or stored into, the tiers below. To flush all tiers, call this with
        a time that covers it, then `flush` of the cache manager, then `open_tiers`: no page of before is hit after.
        None while no engine is up: nothing was done.
        """
        report = self._router.flush(min(quiet_s, MAX_QUIET_S), bytes.fromhex(root) if root is not None else None)
        if report is None:
            return None
        return {"num_dropped": report.num_dropped, "num_referenced": report.num_referenced}

    def open_tiers(self) -> dict[str, Any]:
        """End the quiet of `flush` early."""
        self._router.open_tiers()
        return self.status()

    def root(self, salt: str | None = None) -> str | None:
        """The root, in hex, of all pages of requests with this `cache_salt`; None while no engine is up."""
        engine = self._router.engine
        if engine is None:
            return None
        return engine.facts.hasher.root(None, salt.encode() if salt is not None else None).hex()

    def pause(self) -> dict[str, Any]:
        """Admit nothing new; what runs goes on."""
        return self._set_admitting(False)

    def resume(self) -> dict[str, Any]:
        """Admit again."""
        return self._set_admitting(True)

    def _set_admitting(self, is_admitting: bool) -> dict[str, Any]:
        if self._router.engine is not None:
            self._router.engine.planner.is_admitting = is_admitting
        return self.status()


def _describe(request: Request, now: float) -> dict[str, Any]:
    holding = request.holding
    return {
        "request_id": request.request_id,
        "slot": request.key.slot,
        "generation": request.key.generation,
        "server": request.server,
        "status": request.status.value,
        "priority": request.priority,
        "age_s": now - request.arrival,
        "row": request.row,
        "num_prompt": request.num_prompt,
        "num_generated": request.num_generated,
        "num_scheduled": request.num_scheduled,
        "limit": request.limit,
        "num_preemptions": request.num_preemptions,
        "pages": {group: len(pages) for group, pages in holding.pages.items()} if holding is not None else {},
    }
