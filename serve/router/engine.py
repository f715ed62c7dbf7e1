"""The parts that exist once the engine is up, wired together."""

from collections.abc import Callable
from dataclasses import dataclass

from serve.ipc.messages import Message
from serve.router.admission import Admission, AdmissionLimits
from serve.router.batch import Batch
from serve.router.cache_client import CacheClient
from serve.router.checkpoints import Checkpointer
from serve.router.cost_model import CostModel
from serve.router.ledger import StateLedger
from serve.router.page_needs import PageNeeds
from serve.router.planner import Planner
from serve.router.queue import WaitingQueue
from serve.router.scheduler import Scheduler, SchedulerLimits
from serve.router.settings import EngineFacts, RouterSettings
from serve.router.statistics import RouterStatistics
from serve.router.step_plan import Pipeline
from serve.router.tiers import Tiers


@dataclass(frozen=True)
class Engine:
    """Everything that needs page counts, and so cannot be made before the workers are ready."""

    facts: EngineFacts
    queue: WaitingQueue
    batch: Batch
    ledger: StateLedger
    admission: Admission
    costs: CostModel
    pipeline: Pipeline
    tiers: Tiers
    planner: Planner

    @classmethod
    def build(
        cls,
        settings: RouterSettings,
        facts: EngineFacts,
        cache: CacheClient,
        to_workers: Callable[[Message], None],
        clock: Callable[[], float],
        statistics: RouterStatistics,
    ) -> "Engine":
        """The longest request allowed is one that fits the smallest pool, so that the oldest can always go on."""
        pools = [facts.num_pages[spec.name] * settings.page_size for spec in facts.specs if spec.is_full]
        longest = min([settings.max_total_len, *pools])
        limits = SchedulerLimits(settings.batch_max_tokens, settings.chunked_prefill_size, settings.page_size)
        queue, costs, pipeline = WaitingQueue(), CostModel(facts.prior), Pipeline(settings.num_ranks)
        batch = Batch(min(settings.max_rows, settings.batch_max_tokens))
        ledger = StateLedger(facts.specs, facts.num_pages, settings.page_size)
        admission = Admission(AdmissionLimits(longest, settings.max_queue_size), settings.page_size)
        chunk_tokens = min(settings.chunked_prefill_size, settings.batch_max_tokens)
        needs = PageNeeds(facts.specs, facts.num_pages, settings.page_size, chunk_tokens, admission)
        checkpoints = Checkpointer(ledger, settings.checkpoint_interval, statistics)
        tiers = Tiers(
            settings,
            facts,
            queue,
            batch,
            ledger,
            needs,
            costs,
            pipeline,
            cache,
            to_workers,
            clock,
            statistics.tiers,
        )
        planner = Planner(
            settings.epoch,
            Scheduler(limits),
            queue,
            batch,
            ledger,
            admission,
            needs,
            checkpoints,
            costs,
            pipeline,
            tiers,
            statistics,
        )
        return cls(facts, queue, batch, ledger, admission, costs, pipeline, tiers, planner)
