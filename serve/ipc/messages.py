"""Every message between processes, one tagged struct each.

Bodies stay in the shared request table: prompts, sampling parameters and page names never travel. A table in the
receiving process maps the type to its handler. `slot, generation` names a request; a message whose generation is not
the slot's is stale and is dropped by whoever receives it.
"""

import msgspec

from serve.types import AcquireOutcome, FinishReason, JobId, JobResult


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages; the tag is the class name."""


# --- HTTP server -> router -------------------------------------------------------------------------------------------


class SubmitRequest(Message):
    """A filled slot is ready to run. `server` is the index of the HTTP process that answers for it."""

    slot: int
    generation: int
    server: int
    request_id: str
    priority: int = 0


class FinishRequest(Message):
    """A stop string ended the request: the text keeps the first `num_accepted` generated tokens."""

    slot: int
    generation: int
    num_accepted: int


class AbortRequest(Message):
    """The client has gone, or its deadline passed."""

    slot: int
    generation: int


# --- router -> HTTP server -------------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probability of one token and of the top alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, array_like=True):
    """What one step gave one request.

    token_ids: newly generated, maybe empty. cached_tokens: tokens not computed, by `CacheTier`, set once on the first
    output. prompt_logprobs: of prompt tokens 1.. as chunks complete, in order. finish_reason: set on the last output.
    error: one line, with finish_reason ERROR; error_code the HTTP status that fits it.
    """

    slot: int
    generation: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    cached_tokens: list[int] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_code: int = 500


class OutputBatch(Message):
    """All outputs of one step for one HTTP process."""

    outputs: list[RequestOutput]


class SlotReleased(Message):
    """The router and the workers no longer touch these slots; their owner may bump the generation and reuse them."""

    slots: list[tuple[int, int]]


# --- router <-> cache manager ----------------------------------------------------------------------------------------


class Probe(Message):
    """Which of the request's pages are there? Pins nothing. Names are read from the request table."""

    probe_id: int
    slot: int
    generation: int
    num_pages: int


class ProbeReply(Message):
    """Bitmaps by state group, one per tier below the device.

    Bit i % 8 of byte i // 8 of `host[g]` is page i of group g. Raw presence: whether a prefix is usable is the ledger's
    to say. disk_bytes_per_s: what promotions from disk have reached lately, and 0 before there was any.
    """

    probe_id: int
    host: dict[str, bytes]
    disk: dict[str, bytes]
    disk_bytes_per_s: float = 0.0


class PageRange(msgspec.Struct, frozen=True, array_like=True):
    """Pages [first, first + count) of one state group.

    A checkpoint or tail for boundary L belongs to the page that ends there (`first == L // page_size - 1`) and has that
    page's name.
    """

    group: str
    first: int
    count: int


class Acquire(Message):
    """Pin exactly these objects (all or none) for a load; disk pages are promoted first. Names: the request table.

    `deadline_s`: the lease ends by itself after this many seconds unless `Begin` came.
    """

    job: JobId
    slot: int
    generation: int
    ranges: list[PageRange]
    num_ranks: int
    deadline_s: float


class AcquireReply(Message):
    """GRANTED: host slots by range, in order, with the generations to compare after the copy.

    Nothing is pinned otherwise. An object of n slots gives n entries. MISSING names the absent objects. `promoted`: how
    many of the objects came from disk.
    """

    job: JobId
    outcome: AcquireOutcome
    slots: list[list[int]] = []
    generations: list[list[int]] = []
    missing: list[PageRange] = []
    promoted: int = 0


class Begin(Message):
    """The job goes to the workers now.

    From here only all ranks' answers (or the reaping of the engine group) end the lease. Sent before the job, and no
    later than half of `deadline_s` after the Acquire or Claim was sent.
    """

    job: JobId


class LeaseLost(Message):
    """The answer to a Begin whose lease had ended: cancel the job; its pages are not published."""

    job: JobId


class Release(Message):
    """The holder gives the lease or the claim back without having begun it."""

    job: JobId


class Claim(Message):
    """Give slots to store these objects into (`atomic`: they are published together or not at all).

    What the host has, or is being filled, is left out of the reply. Names: the request table, or `names` (concatenated
    32-byte names in the order of the ranges) for pages whose request may be gone; then `parents` has the name of the
    page before each range (concatenated, the root for a first page) and `root` the root of them all. Room is given by
    page from the first on: all groups of a page or none. atomic: all that is not there yet, or nothing. num_prompt:
    tokens of the request's prompt; whether its pages are worth a place on disk may depend on them.
    """

    job: JobId
    slot: int
    generation: int
    ranges: list[PageRange]
    num_ranks: int
    deadline_s: float
    atomic: bool = False
    names: bytes = b""
    parents: bytes = b""
    root: bytes = b""
    num_prompt: int = 0


class ClaimReply(Message):
    """Pages that may be stored, with their host slots: (group, page index, slots, generations).

    Empty: nothing to do or no room.
    """

    job: JobId
    granted: list[tuple[str, int, list[int], list[int]]]
    num_present: int = 0
    num_refused: int = 0


class Resync(Message):
    """From a restarted cache manager to every worker: which jobs, and which of their host slots, are in use?"""

    nonce: int


class SlotsInUse(Message):
    """A worker's answer to Resync: jobs that have not ended on this rank, and all host slots that they touch."""

    nonce: int
    rank: int
    jobs: list[JobId]
    slots: list[int]


# --- router <-> workers ----------------------------------------------------------------------------------------------


class JoinRow(msgspec.Struct, array_like=True):
    """A request enters the batch in `row`.

    num_known: tokens whose ids stand in the request table (the prompt, and what was generated before a preemption).
    num_cached: leading tokens whose state is already in `pages`; the first chunk starts there.
    pages: by state group, device page ids in order; of a group with checkpoints one, the row's working page.
    num_prompt: prompt tokens (num_known - num_prompt were generated before).
    first_places: by group with a window, the place of its first page; absent: 0.
    restores: by group with checkpoints, the checkpoint page of `num_cached` tokens that is copied into the working
    page before the row's first step; absent: the working page is cleared.
    """

    row: int
    slot: int
    generation: int
    num_prompt: int
    num_known: int
    num_cached: int
    pages: dict[str, list[int]]
    first_places: dict[str, int] = {}
    restores: dict[str, int] = {}


class StepPlan(Message):
    """The change to the batch since the last plan, and what to run; identical on every rank, run in order of `step`.

    Apply in this order: leaves, joins, new_pages (further places of groups that are paged by place). Then run: each
    (row, count) of `chunks` computes the next `count` known tokens of a prefilling row; every row whose known tokens
    are all computed computes one token, its last sampled one, unless it is named in `paused`. A row samples when a step
    computes its last known token (chunk end) or in decode. Then, for each (row, group, page) of `snapshots`, the row
    stands on a page boundary and its working page is copied to that page.
    A plan may have only leaves and compute nothing; it is still answered.
    """

    epoch: int
    step: int
    leaves: list[int] = []
    joins: list[JoinRow] = []
    new_pages: list[tuple[int, str, list[int]]] = []
    chunks: list[tuple[int, int]] = []
    paused: list[int] = []
    snapshots: list[tuple[int, str, int]] = []


class StepResult(Message):
    """What a rank did with a plan. Only rank 0 fills rows, token_ids and logprobs.

    rows and token_ids go together: row -> the token sampled for it. logprobs: row -> entry, where wanted.
    prompt_logprobs: row -> entries for the prompt tokens of the chunk just computed. compute_s: seconds of the step on
    this rank. failed_rows: rows whose logits were not finite or whose parameters could not be applied -> one line.
    """

    epoch: int
    step: int
    rank: int
    compute_s: float
    rows: list[int] = []
    token_ids: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    failed_rows: dict[int, str] = {}


class LoadPages(Message):
    """Copy host slots into device pages on the load path. Page `pages[i]` of `group` comes from the next n of `slots`.

    n is the slots that an object of the group takes, in order of its bytes.
    Layers [first_layer, last_layer) only; today always all.
    """

    job: JobId
    group: str
    pages: list[int]
    slots: list[int]
    generations: list[int]
    first_layer: int
    last_layer: int


class StorePages(Message):
    """Copy device pages out into host slots on the store path, once the plan `after_step` has run.

    `slots` as in LoadPages. A rank writes only while the header's generation is the one given, and refuses (FAILED)
    generations of an older cache manager than the one that last sent it Resync (`host_arena.manager_of`).
    """

    job: JobId
    group: str
    pages: list[int]
    slots: list[int]
    generations: list[int]
    after_step: int


class CancelJob(Message):
    """Stop what is not yet on a stream; the job still gets its one answer."""

    job: JobId


class JobAnswer(Message):
    """The one terminal answer of a rank to a job.

    bad_slots: host slots (first slot of each object) whose bytes did not match their checksum although the generation
    did; the cache manager drops these pages.
    """

    job: JobId
    rank: int
    result: JobResult
    detail: str = ""
    bad_slots: list[int] = []


# --- launcher <-> children, over each child's pipe -------------------------------------------------------------------


class ChildStart(Message):
    """First message to a child. config: ResolvedConfig as JSON; model: ModelConfig and layout facts as plain data.

    module: what to run instead of the role's own module, where set. restarts: earlier lives of this child.
    """

    epoch: int
    config_json: bytes
    model: dict[str, object]
    fds: dict[str, int]
    module: str = ""
    restarts: int = 0


class ChildReady(Message):
    """A child has finished starting. `info` depends on the role (see docs/architecture.md)."""

    role: str
    index: int
    info: dict[str, object]


class ChildFailed(Message):
    """A child cannot start: one clear line for the user."""

    role: str
    index: int
    reason: str


class Progress(Message):
    """A worker's loading progress, for the launcher's progress bar."""

    role: str
    index: int
    phase: str
    done: int
    total: int


class EngineUp(Message):
    """The engine group of `epoch` answers. `info`: namespace (hex), layout, pages by group, model facts."""

    epoch: int
    info: dict[str, object]


class EngineDown(Message):
    """The engine group is gone; HTTP answers 503 until the next EngineUp."""

    epoch: int
    reason: str


class ServerDown(Message):
    """To the router: HTTP process `server` died; abort its requests. A new one takes its slots as they are released."""

    server: int


class CacheDown(Message):
    """To the router: the cache manager died; every lease and probe on it is void, and so are its host slots."""


class CacheUp(Message):
    """To the router: a new cache manager answers, with an empty host tier. `restarts` counts them."""

    restarts: int


class StopChild(Message):
    """Stop in order and exit 0. drain_s: seconds that requests get to finish."""

    drain_s: float
