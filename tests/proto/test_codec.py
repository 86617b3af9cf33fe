import contextlib
import random
from typing import Any, get_args

import msgspec
import pytest

from octavo.wire.base import MAX_TOKENS, NULL_BLOCK
from octavo.wire.codec import (
    WireError,
    decode_from_frontend,
    decode_from_peer,
    decode_from_worker,
    decode_to_frontend,
    decode_to_peer,
    decode_to_worker,
    encode,
)
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts
from octavo.wire.peers import BlocksRead, ReadBlocks
from octavo.wire.requests import (
    MAX_PREFIXES,
    MAX_PRIORITY,
    Abort,
    BlockUse,
    CacheKey,
    Delta,
    Deltas,
    EndSequence,
    FinishReason,
    FromFrontend,
    FrontendHello,
    FrontendWelcome,
    GeneratedSequence,
    Lease,
    Notice,
    NoticeKind,
    Notices,
    PinPrefixes,
    PinRefused,
    Prefix,
    PrefixCacheReset,
    PrefixesChanged,
    Refused,
    Rejected,
    RejectReason,
    Renew,
    Renewed,
    Request,
    ResetPrefixCache,
    ServiceLoad,
    ServiceStatus,
    StatusChanged,
    Submit,
    ToFrontend,
    Unregistered,
)
from octavo.wire.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_PARALLEL,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    BeamSearch,
    EarlyStopping,
    Logprobs,
    SamplingParams,
)
from octavo.wire.steps import (
    MAX_BLOCK_SIZE,
    MAX_CANDIDATES,
    BlockContent,
    BlockMove,
    BlockMoves,
    BlockServer,
    BlocksFetched,
    BlocksPulled,
    Candidates,
    DiskMoves,
    DiskUse,
    FailureReason,
    FromWorker,
    Heartbeat,
    KVDisk,
    KVGroup,
    ModelInfo,
    PromptLogprobs,
    PullBlocks,
    Remap,
    SampledToken,
    SequenceFailure,
    SequenceFork,
    SequenceStart,
    SequenceWork,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
    ToWorker,
    WorkerDismissed,
    WorkerGoodbye,
    WorkerHello,
    WorkerRefused,
    WorkerUnregistered,
    WorkerWelcome,
)

EPOCH = 2**64 - 1
SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    seed=EPOCH,
    num_sequences=4,
    max_tokens=16,
    min_tokens=3,
    stop_token_ids=[2],
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    logit_bias=[(7, -100.0), (8, 1.5)],
    allowed_token_ids=[2, 7, 8],
    banned_token_ids=[9],
    logprobs=5,
    prompt_logprobs=0,
)
BEAM_SEARCH = SamplingParams(beam=BeamSearch(4, 1.2, EarlyStopping.NEVER), num_sequences=2, max_tokens=8)
MODEL = ModelInfo("model", "fingerprint", "float32", 1000, 2048)
STATUS = ServiceStatus(1, MODEL, 4096, 16, load=ServiceLoad(3, 2, [BlockUse(16, 256, 31)]))
GENERATED = [GeneratedSequence([4], finished=False), GeneratedSequence([4, 5], finished=True)]
REQUEST = Request(
    request_id="r",
    attempt=1,
    resubmitted=False,
    model_fingerprint="fingerprint",
    prompt_token_ids=[1, 2, 3],
    generated=GENERATED,
    sampling=SAMPLING,
    priority=-MAX_PRIORITY,
    tenant="tenant",
    cache_key=CacheKey("adapter", "salt"),
    age_ms=250,
)
LOGPROBS = Logprobs(-0.5, 2, [3, 7], [-0.25, -0.5])
DELTA = Delta("r", 1, 0, 4, EPOCH, [7], FinishReason.STOP, 2, 1, 16, [LOGPROBS], [LOGPROBS, LOGPROBS], -3.5)
PREFIXES = [Prefix("system", [1, 2, 3])]
COSTS = StepCosts(PrefillCosts(0.004, 2.5e-5, 1e-9), SwapCosts(2e-5, 4e-5, 5e-5))
HELLO = WorkerHello(
    schema_version=1,
    worker_id="w",
    incarnation=3,
    process=2,
    model=MODEL,
    device="cpu",
    world_size=1,
    num_blocks=100,
    num_cpu_blocks=50,
    block_size=16,
    kv_bytes_per_token=4096,
    kv_groups=[KVGroup(0), KVGroup(4096)],
    costs=COSTS,
)
DISK_MOVES = DiskMoves(store=[BlockContent(bytes(32), 0, 7)], fetch=[BlockContent(bytes(range(32)), 1, 8)])
PLAN = StepPlan(
    epoch=EPOCH,
    incarnation=3,
    step_id=1,
    answered_step_id=0,
    forget=[9],
    moves=BlockMoves(swap_in=[BlockMove(4, 5)], copy=[BlockMove(5, 6)]),
    starts=[SequenceStart(1, 0, [1, 2], [3], 1, SAMPLING)],
    forks=[SequenceFork(1, 2, 1)],
    remaps=[Remap(1, 1, 0, 7)],
    work=[SequenceWork(1, 2, [[0, 1], [NULL_BLOCK, 2]], None, [2, 3]), SequenceWork(4, 1, [], 11)],
)
RESULT = StepResult(
    epoch=EPOCH,
    incarnation=3,
    step_id=1,
    outcome=StepOutcome.DONE,
    sampled=[SampledToken(1, 5), SampledToken(2, 6, LOGPROBS)],
    candidates=[Candidates(4, [8, 9], [-0.1, -0.2])],
    prompt_logprobs=[PromptLogprobs(1, 1, [LOGPROBS])],
    failed=[SequenceFailure(2, FailureReason.NO_TOKEN_LEFT, "nothing is left")],
    times=StepTimes(1, 2, 3),
    detail="",
)

DIRECTIONS: dict[str, tuple[Any, list[Any]]] = {
    "from frontend": (
        decode_from_frontend,
        [
            FrontendHello(1, 5),
            Submit(EPOCH, REQUEST),
            Submit(EPOCH, msgspec.structs.replace(REQUEST, sampling=BEAM_SEARCH, generated=[])),
            Renew(EPOCH, [Lease("r", 1)]),
            Abort(EPOCH, ["r"]),
            EndSequence(EPOCH, "r", 2, MAX_PARALLEL - 1),
            PinPrefixes(EPOCH, PREFIXES),
            ResetPrefixCache(EPOCH, 1, None),
            ResetPrefixCache(EPOCH, 2, "salt"),
        ],
    ),
    "to frontend": (
        decode_to_frontend,
        [
            FrontendWelcome(EPOCH, STATUS),
            StatusChanged(EPOCH, ServiceStatus(0, None, 0, 1)),
            PrefixesChanged(EPOCH, PREFIXES),
            PinRefused(EPOCH, "system", "no room"),
            PrefixCacheReset(EPOCH, 2, 12, 3, 1),
            Renewed(EPOCH, [Lease("r", 1)], STATUS),
            Deltas(EPOCH, [DELTA]),
            Notices(EPOCH, [Notice("r", 1, NoticeKind.QUEUED, 3), Notice("s", 2, NoticeKind.RESUMED, 0)]),
            Rejected(EPOCH, "r", 1, RejectReason.NEVER_FITS_KV, "too long"),
            Refused("old"),
            Unregistered(EPOCH),
        ],
    ),
    "from worker": (
        decode_from_worker,
        [
            HELLO,
            msgspec.structs.replace(HELLO, costs=None),
            msgspec.structs.replace(HELLO, kv_disk=KVDisk(0.001, mirror=True)),
            RESULT,
            msgspec.structs.replace(HELLO, block_server=BlockServer("tcp://a:1", "same", has_device=False)),
            BlocksFetched(EPOCH, 3, 1, [True, False]),
            BlocksPulled(EPOCH, 3, 1, is_complete=True),
            Heartbeat(EPOCH, 3, 1),
            Heartbeat(EPOCH, 3, 1, draining=True),
            Heartbeat(EPOCH, 3, 1, disk=DiskUse(5, 9, 2)),
            msgspec.structs.replace(HELLO, kv_disk=KVDisk(place="host:/kv")),
            WorkerGoodbye(EPOCH, 3),
        ],
    ),
    "to peer": (decode_to_peer, [ReadBlocks(1, 3, from_cpu=False, block_ids=[2, 0])]),
    "from peer": (decode_from_peer, [BlocksRead(1, found=True)]),
    "to worker": (
        decode_to_worker,
        [
            WorkerWelcome(EPOCH),
            WorkerRefused("no"),
            WorkerUnregistered(EPOCH),
            WorkerDismissed(EPOCH),
            PLAN,
            msgspec.structs.replace(PLAN, disk=DISK_MOVES),
            PullBlocks(EPOCH, 3, 1, 7, "ipc:///a", 4, from_cpu=True, moves=[BlockMove(1, 2)]),
        ],
    ),
}
MESSAGES = [(decode, message) for decode, messages in DIRECTIONS.values() for message in messages]


@pytest.mark.parametrize(("decode", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_comes_back_as_it_was_sent(decode: Any, message: Any) -> None:
    assert decode(encode(message)) == message


def test_every_message_of_every_direction_is_among_those_tested() -> None:
    kinds = {type(message) for _, messages in DIRECTIONS.values() for message in messages}
    unions = (FromFrontend, ToFrontend, FromWorker, ToWorker)
    assert kinds == {ReadBlocks, BlocksRead, *(kind for union in unions for kind in get_args(union))}


def test_a_steady_decode_plan_of_64_sequences_is_a_few_hundred_bytes() -> None:
    work = [SequenceWork(5000 + i, 1) for i in range(64)]
    plan = StepPlan(EPOCH, EPOCH, 1000, 999, [], BlockMoves(), [], [], [], work)
    assert len(encode(plan)) < 600


def test_a_steady_result_of_64_sequences_is_a_few_hundred_bytes() -> None:
    sampled = [SampledToken(5000 + i, 30_000 + i) for i in range(64)]
    result = StepResult(EPOCH, EPOCH, 1000, StepOutcome.DONE, sampled, [], [], [], StepTimes(100, 20_000, 300), "")
    assert len(encode(result)) < 600


def test_what_a_step_does_not_move_is_no_work() -> None:
    assert not BlockMoves()
    assert all(BlockMoves(**{kind: [BlockMove(0, 1)]}) for kind in ("swap_out", "swap_in", "copy"))


@pytest.mark.parametrize(
    ("decode", "wrong"),
    [
        (decode_from_frontend, [*msgspec.to_builtins(Abort(1, [])), "unknown field"]),
        (decode_from_frontend, ["Abort", 1]),
        (decode_from_frontend, ["Nonsense", 1]),
        (decode_from_frontend, ["WorkerWelcome", 1]),
        (decode_from_frontend, ["Abort", -1, []]),
        (decode_from_frontend, ["Abort", 1, [""]]),
        (decode_from_frontend, ["Abort", 1, ["x" * 257]]),
        (decode_from_frontend, ["Abort", "1", []]),
        (decode_from_frontend, ["EndSequence", 1, "r", 0, 0]),
        (decode_from_frontend, ["EndSequence", 1, "r", 1, MAX_PARALLEL]),
        (decode_from_frontend, ["PinPrefixes", 1, [["name", []]]]),
        (decode_from_frontend, ["PinPrefixes", 1, [["", [1]]]]),
        (decode_from_frontend, ["PinPrefixes", 1, [["name", [1]]] * (MAX_PREFIXES + 1)]),
        (decode_from_worker, ["Heartbeat", 1, 1, -1]),
        (decode_to_frontend, ["PinRefused", 1, "name", "x" * 4097]),
    ],
)
def test_what_is_out_of_shape_or_range_is_refused(decode: Any, wrong: list[Any]) -> None:
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(wrong))


def assert_refused(decode: Any, message: Any, **changes: Any) -> None:
    """`message` is taken, and refused with `changes`."""
    decode(encode(message))
    with pytest.raises(WireError):
        decode(encode(msgspec.structs.replace(message, **changes)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_id", 0),
        ("forget", [-1]),
        ("moves", BlockMoves(copy=[BlockMove(0, -2)])),
        ("starts", [SequenceStart(1, -1, [1], [], 0, SAMPLING)]),
        ("starts", [SequenceStart(1, 0, [2**31], [], 0, SAMPLING)]),
        ("forks", [SequenceFork(1, -1, 0)]),
        ("remaps", [Remap(1, 256, 0, 0)]),
        ("remaps", [Remap(1, 0, 0, -2)]),
        ("work", [SequenceWork(1, 0)]),
        ("work", [SequenceWork(1, 1, [[-2]])]),
        ("work", [SequenceWork(1, 1, [[]] * 257)]),
        ("work", [SequenceWork(1, 1, [], -1)]),
        ("work", [SequenceWork(1, 1, [], None, [0] * (MAX_PARALLEL + 1))]),
        ("disk", DiskMoves(store=[BlockContent(bytes(31), 0, 0)])),
        ("disk", DiskMoves(fetch=[BlockContent(bytes(32), 256, 0)])),
        ("disk", DiskMoves(fetch=[BlockContent(bytes(32), 0, NULL_BLOCK)])),
    ],
)
def test_plans_out_of_range_are_refused(field: str, value: Any) -> None:
    assert_refused(decode_to_worker, PLAN, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("outcome", "unheard of"),
        ("sampled", [SampledToken(1, 2**31)]),
        ("sampled", [SampledToken(1, 1, Logprobs(-1.0, 0, [], []))]),
        ("sampled", [SampledToken(1, 1, Logprobs(-1.0, 1, [0] * (MAX_TOP_LOGPROBS + 1), []))]),
        ("candidates", [Candidates(1, [0] * (MAX_CANDIDATES + 1), [])]),
        ("prompt_logprobs", [PromptLogprobs(1, 0, [])]),
        ("times", StepTimes(-1, 0, 0)),
    ],
)
def test_results_out_of_range_are_refused(field: str, value: Any) -> None:
    assert_refused(decode_from_worker, RESULT, **{field: value})


@pytest.mark.parametrize("field", ["preemptions", "swaps", "cached_prompt_tokens"])
def test_counts_that_clients_are_told_have_32_bits(field: str) -> None:
    for value, is_refused in ((2**32 - 1, False), (2**32, True)):
        frame = encode(Deltas(EPOCH, [msgspec.structs.replace(DELTA, **{field: value})]))
        with pytest.raises(WireError) if is_refused else contextlib.nullcontext():
            decode_to_frontend(frame)


def test_a_place_in_a_queue_has_32_bits() -> None:
    with pytest.raises(WireError):
        decode_to_frontend(encode(Notices(EPOCH, [Notice("r", 1, NoticeKind.QUEUED, 2**32)])))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", ""),
        ("world_size", 0),
        ("num_blocks", -1),
        ("num_cpu_blocks", -1),
        ("block_size", 0),
        ("block_size", MAX_BLOCK_SIZE + 1),
        ("kv_groups", [KVGroup(0)] * 257),
        ("kv_groups", [KVGroup(-1)]),
        ("costs", StepCosts(PrefillCosts(-0.1, 0.0, 0.0), COSTS.swap)),
        ("costs", StepCosts(PrefillCosts(0.0, float("nan"), 0.0), COSTS.swap)),
        ("costs", StepCosts(PrefillCosts(0.0, 0.0, float("inf")), COSTS.swap)),
        ("costs", StepCosts(COSTS.prefill, SwapCosts(3601.0, 0.0, 0.0))),
        ("kv_disk", KVDisk(-0.1)),
        ("kv_disk", KVDisk(place="x" * 4097)),
    ],
)
def test_workers_out_of_range_are_refused(field: str, value: Any) -> None:
    assert_refused(decode_from_worker, HELLO, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("attempt", 0),
        ("prompt_token_ids", [-1]),
        ("generated", [GeneratedSequence([], finished=False)] * (MAX_PARALLEL + 1)),
        ("priority", MAX_PRIORITY + 1),
        ("priority", -MAX_PRIORITY - 1),
        ("tenant", "x" * 257),
        ("cache_key", CacheKey("x" * 257, "")),
        ("cache_key", CacheKey("", "x" * 257)),
        ("age_ms", -1),
    ],
)
def test_requests_out_of_range_are_refused(field: str, value: Any) -> None:
    request = msgspec.structs.replace(REQUEST, **{field: value})
    assert_refused(decode_from_frontend, Submit(1, REQUEST), request=request)


@pytest.mark.parametrize(("salted_from", "accepted"), [(0, True), (3, True), (4, False), (-1, False)])
def test_a_salt_counts_from_a_token_of_the_prompt_on(salted_from: int, accepted: bool) -> None:
    key = ["adapter", "salt", salted_from]
    raw = [key if part == ["adapter", "salt", 0] else part for part in msgspec.to_builtins(REQUEST)]
    assert key in raw
    with contextlib.nullcontext() if accepted else pytest.raises(WireError):
        decode_from_frontend(msgspec.msgpack.encode(["Submit", 1, raw]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("num_sequences", 0),
        ("num_sequences", MAX_PARALLEL + 1),
        ("beam", BeamSearch(0, 1.0, EarlyStopping.ON)),
        ("beam", BeamSearch(MAX_PARALLEL + 1, 1.0, EarlyStopping.ON)),
        ("beam", BeamSearch(2, float("nan"), EarlyStopping.ON)),
        ("max_tokens", 0),
        ("max_tokens", MAX_TOKENS + 1),
        ("min_tokens", -1),
        ("stop_token_ids", [0] * (MAX_STOP_TOKEN_IDS + 1)),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("logit_bias", [(0, 100.1)]),
        ("logit_bias", [(-1, 0.0)]),
        ("logit_bias", [(0, 0.0)] * (MAX_LOGIT_BIAS + 1)),
        ("allowed_token_ids", [0] * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("banned_token_ids", [0] * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("logprobs", MAX_TOP_LOGPROBS + 1),
        ("prompt_logprobs", -1),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    sampling = msgspec.structs.replace(SAMPLING, **{field: value})
    request = msgspec.structs.replace(REQUEST, sampling=sampling)
    assert_refused(decode_from_frontend, Submit(1, REQUEST), request=request)


def test_the_most_sequences_side_by_side_are_the_beams_of_a_search_or_those_asked_for() -> None:
    assert (SAMPLING.parallel, BEAM_SEARCH.parallel) == (4, 4)


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\x91" * 100_000, b"\xa4\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"],
    ids=["empty", "reserved byte", "http", "deep nesting", "invalid utf-8", "four billion elements"],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_garbage_is_a_wire_error_and_nothing_else(direction: str, frame: bytes) -> None:
    with pytest.raises(WireError):
        DIRECTIONS[direction][0](frame)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_mutated_messages_decode_or_raise_a_wire_error(direction: str) -> None:
    decode, messages = DIRECTIONS[direction]
    frames = [encode(message) for message in messages]
    rng = random.Random(7)
    refused = 0
    for _ in range(20_000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            decode(bytes(frame[: rng.randint(1, len(frame))]))
        except WireError:
            refused += 1
    assert refused > 10_000
