import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_CPU: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_CORDONED: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_SWAPPED: _ClassVar[RequestState]
    REQUEST_STATE_ENDED: _ClassVar[RequestState]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_FREE: _ClassVar[BlockState]
    BLOCK_STATE_CACHED: _ClassVar[BlockState]
    BLOCK_STATE_PRIVATE: _ClassVar[BlockState]
    BLOCK_STATE_SHARED: _ClassVar[BlockState]
    BLOCK_STATE_PINNED: _ClassVar[BlockState]
    BLOCK_STATE_PARKED: _ClassVar[BlockState]
    BLOCK_STATE_SWAPPED: _ClassVar[BlockState]
    BLOCK_STATE_ARRIVING: _ClassVar[BlockState]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_CPU: Tier
TIER_DISK: Tier
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_CORDONED: WorkerState
WORKER_STATE_DRAINING: WorkerState
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_SWAPPED: RequestState
REQUEST_STATE_ENDED: RequestState
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_FREE: BlockState
BLOCK_STATE_CACHED: BlockState
BLOCK_STATE_PRIVATE: BlockState
BLOCK_STATE_SHARED: BlockState
BLOCK_STATE_PINNED: BlockState
BLOCK_STATE_PARKED: BlockState
BLOCK_STATE_SWAPPED: BlockState
BLOCK_STATE_ARRIVING: BlockState

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("waiting", "running", "frontends", "workers", "preemptions", "dropped_messages", "swapped", "swaps", "pinned_prefixes", "tenants", "waiting_tokens")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FRONTENDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    PINNED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    frontends: int
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    preemptions: int
    dropped_messages: int
    swapped: int
    swaps: int
    pinned_prefixes: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLoad]
    waiting_tokens: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., frontends: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., preemptions: _Optional[int] = ..., dropped_messages: _Optional[int] = ..., swapped: _Optional[int] = ..., swaps: _Optional[int] = ..., pinned_prefixes: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantLoad, _Mapping]]] = ..., waiting_tokens: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("id", "device", "model", "running", "blocks_total", "blocks_free", "block_size", "steps", "tokens_computed", "tokens_sampled", "times", "blocks_cached", "blocks_cached_free", "blocks_parked", "blocks_pinned", "blocks_referenced", "cpu_blocks_total", "cpu_blocks_free", "cpu_blocks_referenced", "swapped", "steps_in_flight", "token_rate", "state", "world_size", "drafted_tokens", "accepted_tokens", "tiers", "moved_in")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PARKED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    CPU_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CPU_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    CPU_BLOCKS_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_RATE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MOVED_IN_FIELD_NUMBER: _ClassVar[int]
    id: str
    device: str
    model: str
    running: int
    blocks_total: int
    blocks_free: int
    block_size: int
    steps: int
    tokens_computed: int
    tokens_sampled: int
    times: StageTimes
    blocks_cached: int
    blocks_cached_free: int
    blocks_parked: int
    blocks_pinned: int
    blocks_referenced: int
    cpu_blocks_total: int
    cpu_blocks_free: int
    cpu_blocks_referenced: int
    swapped: int
    steps_in_flight: int
    token_rate: float
    state: WorkerState
    world_size: int
    drafted_tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted_tokens: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedCompositeFieldContainer[CacheTier]
    moved_in: int
    def __init__(self, id: _Optional[str] = ..., device: _Optional[str] = ..., model: _Optional[str] = ..., running: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., block_size: _Optional[int] = ..., steps: _Optional[int] = ..., tokens_computed: _Optional[int] = ..., tokens_sampled: _Optional[int] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ..., blocks_cached: _Optional[int] = ..., blocks_cached_free: _Optional[int] = ..., blocks_parked: _Optional[int] = ..., blocks_pinned: _Optional[int] = ..., blocks_referenced: _Optional[int] = ..., cpu_blocks_total: _Optional[int] = ..., cpu_blocks_free: _Optional[int] = ..., cpu_blocks_referenced: _Optional[int] = ..., swapped: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., token_rate: _Optional[float] = ..., state: _Optional[_Union[WorkerState, str]] = ..., world_size: _Optional[int] = ..., drafted_tokens: _Optional[_Iterable[int]] = ..., accepted_tokens: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[_Union[CacheTier, _Mapping]]] = ..., moved_in: _Optional[int] = ...) -> None: ...

class CacheTier(_message.Message):
    __slots__ = ("tier", "blocks", "capacity", "hits", "hit_tokens", "evicted_blocks", "missed_blocks", "moves", "place")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    blocks: int
    capacity: int
    hits: int
    hit_tokens: int
    evicted_blocks: int
    missed_blocks: int
    moves: _containers.RepeatedCompositeFieldContainer[TierMoves]
    place: str
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., blocks: _Optional[int] = ..., capacity: _Optional[int] = ..., hits: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., missed_blocks: _Optional[int] = ..., moves: _Optional[_Iterable[_Union[TierMoves, _Mapping]]] = ..., place: _Optional[str] = ...) -> None: ...

class TierMoves(_message.Message):
    __slots__ = ("to", "blocks")
    TO_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    to: Tier
    blocks: int
    def __init__(self, to: _Optional[_Union[Tier, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("prepare_us", "model_us", "sample_us")
    PREPARE_US_FIELD_NUMBER: _ClassVar[int]
    MODEL_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    prepare_us: int
    model_us: int
    sample_us: int
    def __init__(self, prepare_us: _Optional[int] = ..., model_us: _Optional[int] = ..., sample_us: _Optional[int] = ...) -> None: ...

class TenantLoad(_message.Message):
    __slots__ = ("tenant", "weight", "virtual_time", "waiting", "held")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_TIME_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    virtual_time: float
    waiting: int
    held: int
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., virtual_time: _Optional[float] = ..., waiting: _Optional[int] = ..., held: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("state", "tenant", "page_size", "page_token")
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    state: RequestState
    tenant: str
    page_size: int
    page_token: str
    def __init__(self, state: _Optional[_Union[RequestState, str]] = ..., tenant: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestStatus]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequestStatus(_message.Message):
    __slots__ = ("request_id", "frontend_id", "tenant", "priority", "state", "worker_id", "prompt_tokens", "computed_tokens", "output_tokens", "sequences", "preemptions", "swaps", "age", "drafts", "drafted_tokens", "accepted_tokens", "moves_to")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVES_TO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    frontend_id: str
    tenant: str
    priority: int
    state: RequestState
    worker_id: str
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    sequences: int
    preemptions: int
    swaps: int
    age: _duration_pb2.Duration
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    moves_to: str
    def __init__(self, request_id: _Optional[str] = ..., frontend_id: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., state: _Optional[_Union[RequestState, str]] = ..., worker_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., preemptions: _Optional[int] = ..., swaps: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., drafts: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., moves_to: _Optional[str] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id", "asker")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    asker: str
    def __init__(self, request_id: _Optional[str] = ..., asker: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("explanations",)
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    explanations: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, explanations: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("status", "queue_position", "ahead_request_ids", "obstacles", "step_ids", "tokens_in_flight", "cache")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    AHEAD_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    OBSTACLES_FIELD_NUMBER: _ClassVar[int]
    STEP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    status: RequestStatus
    queue_position: int
    ahead_request_ids: _containers.RepeatedScalarFieldContainer[str]
    obstacles: _containers.RepeatedCompositeFieldContainer[Obstacle]
    step_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens_in_flight: int
    cache: CacheLookup
    def __init__(self, status: _Optional[_Union[RequestStatus, _Mapping]] = ..., queue_position: _Optional[int] = ..., ahead_request_ids: _Optional[_Iterable[str]] = ..., obstacles: _Optional[_Iterable[_Union[Obstacle, _Mapping]]] = ..., step_ids: _Optional[_Iterable[int]] = ..., tokens_in_flight: _Optional[int] = ..., cache: _Optional[_Union[CacheLookup, _Mapping]] = ...) -> None: ...

class CacheLookup(_message.Message):
    __slots__ = ("tokens", "device_tokens", "cpu_tokens", "disk_tokens", "worker_id", "reason", "position", "token", "other_token", "evicted", "elsewhere", "replica_tokens", "source")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[CacheLookup.Reason]
        REASON_SHORT: _ClassVar[CacheLookup.Reason]
        REASON_OFF: _ClassVar[CacheLookup.Reason]
        REASON_BYPASSED: _ClassVar[CacheLookup.Reason]
        REASON_EVICTED: _ClassVar[CacheLookup.Reason]
        REASON_OTHER_WORKER: _ClassVar[CacheLookup.Reason]
        REASON_NOT_KEPT: _ClassVar[CacheLookup.Reason]
        REASON_DIFFERS: _ClassVar[CacheLookup.Reason]
        REASON_ENDS: _ClassVar[CacheLookup.Reason]
        REASON_OTHER_SALT: _ClassVar[CacheLookup.Reason]
        REASON_UNKNOWN: _ClassVar[CacheLookup.Reason]
    REASON_UNSPECIFIED: CacheLookup.Reason
    REASON_SHORT: CacheLookup.Reason
    REASON_OFF: CacheLookup.Reason
    REASON_BYPASSED: CacheLookup.Reason
    REASON_EVICTED: CacheLookup.Reason
    REASON_OTHER_WORKER: CacheLookup.Reason
    REASON_NOT_KEPT: CacheLookup.Reason
    REASON_DIFFERS: CacheLookup.Reason
    REASON_ENDS: CacheLookup.Reason
    REASON_OTHER_SALT: CacheLookup.Reason
    REASON_UNKNOWN: CacheLookup.Reason
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    OTHER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    device_tokens: int
    cpu_tokens: int
    disk_tokens: int
    worker_id: str
    reason: CacheLookup.Reason
    position: int
    token: int
    other_token: int
    evicted: _duration_pb2.Duration
    elsewhere: str
    replica_tokens: int
    source: str
    def __init__(self, tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., cpu_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., worker_id: _Optional[str] = ..., reason: _Optional[_Union[CacheLookup.Reason, str]] = ..., position: _Optional[int] = ..., token: _Optional[int] = ..., other_token: _Optional[int] = ..., evicted: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., elsewhere: _Optional[str] = ..., replica_tokens: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class Obstacle(_message.Message):
    __slots__ = ("worker_id", "kind", "needed", "available")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Obstacle.Kind]
        KIND_TOKEN_BUDGET: _ClassVar[Obstacle.Kind]
        KIND_SEQUENCE_SLOTS: _ClassVar[Obstacle.Kind]
        KIND_KV_BLOCKS: _ClassVar[Obstacle.Kind]
        KIND_SWAPPED: _ClassVar[Obstacle.Kind]
        KIND_PREEMPTION: _ClassVar[Obstacle.Kind]
        KIND_CAPACITY: _ClassVar[Obstacle.Kind]
        KIND_DELAY: _ClassVar[Obstacle.Kind]
        KIND_NO_WORKER: _ClassVar[Obstacle.Kind]
        KIND_ISOLATION: _ClassVar[Obstacle.Kind]
        KIND_DISK: _ClassVar[Obstacle.Kind]
        KIND_MOVE: _ClassVar[Obstacle.Kind]
        KIND_PREFIX_COPY: _ClassVar[Obstacle.Kind]
    KIND_UNSPECIFIED: Obstacle.Kind
    KIND_TOKEN_BUDGET: Obstacle.Kind
    KIND_SEQUENCE_SLOTS: Obstacle.Kind
    KIND_KV_BLOCKS: Obstacle.Kind
    KIND_SWAPPED: Obstacle.Kind
    KIND_PREEMPTION: Obstacle.Kind
    KIND_CAPACITY: Obstacle.Kind
    KIND_DELAY: Obstacle.Kind
    KIND_NO_WORKER: Obstacle.Kind
    KIND_ISOLATION: Obstacle.Kind
    KIND_DISK: Obstacle.Kind
    KIND_MOVE: Obstacle.Kind
    KIND_PREFIX_COPY: Obstacle.Kind
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    kind: Obstacle.Kind
    needed: int
    available: int
    def __init__(self, worker_id: _Optional[str] = ..., kind: _Optional[_Union[Obstacle.Kind, str]] = ..., needed: _Optional[int] = ..., available: _Optional[int] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ("from_step",)
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    def __init__(self, from_step: _Optional[int] = ...) -> None: ...

class WatchStepsResponse(_message.Message):
    __slots__ = ("step", "record", "missed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    step: int
    record: bytes
    missed: int
    def __init__(self, step: _Optional[int] = ..., record: _Optional[bytes] = ..., missed: _Optional[int] = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class WatchBlocksResponse(_message.Message):
    __slots__ = ("load", "workers", "requests")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    load: GetLoadResponse
    workers: _containers.RepeatedCompositeFieldContainer[WorkerBlocks]
    requests: _containers.RepeatedCompositeFieldContainer[RequestStatus]
    def __init__(self, load: _Optional[_Union[GetLoadResponse, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerBlocks, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RequestStatus, _Mapping]]] = ...) -> None: ...

class WorkerBlocks(_message.Message):
    __slots__ = ("worker_id", "states", "cpu_states", "owners")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    CPU_STATES_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    states: bytes
    cpu_states: bytes
    owners: _containers.RepeatedCompositeFieldContainer[BlockOwner]
    def __init__(self, worker_id: _Optional[str] = ..., states: _Optional[bytes] = ..., cpu_states: _Optional[bytes] = ..., owners: _Optional[_Iterable[_Union[BlockOwner, _Mapping]]] = ...) -> None: ...

class BlockOwner(_message.Message):
    __slots__ = ("request_id", "prefix_name", "block_ids", "cpu_block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CPU_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefix_name: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    cpu_block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., prefix_name: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., cpu_block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CordonWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class CordonWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "grace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadmitWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ReadmitWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("name", "token_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[PinnedPrefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[PinnedPrefix, _Mapping]]] = ...) -> None: ...

class PinnedPrefix(_message.Message):
    __slots__ = ("name", "tokens", "ready_worker_ids", "pending_worker_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    READY_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    PENDING_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: int
    ready_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    pending_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[int] = ..., ready_worker_ids: _Optional[_Iterable[str]] = ..., pending_worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQuarantineResponse(_message.Message):
    __slots__ = ("payloads",)
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    payloads: _containers.RepeatedCompositeFieldContainer[QuarantinedPayload]
    def __init__(self, payloads: _Optional[_Iterable[_Union[QuarantinedPayload, _Mapping]]] = ...) -> None: ...

class QuarantinedPayload(_message.Message):
    __slots__ = ("payload", "request_id", "prompt_tokens", "remaining", "reason")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    payload: str
    request_id: str
    prompt_tokens: int
    remaining: _duration_pb2.Duration
    reason: str
    def __init__(self, payload: _Optional[str] = ..., request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ClearQuarantineRequest(_message.Message):
    __slots__ = ("payload", "all")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    payload: str
    all: bool
    def __init__(self, payload: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class ClearQuarantineResponse(_message.Message):
    __slots__ = ("cleared",)
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    cleared: int
    def __init__(self, cleared: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("salt",)
    SALT_FIELD_NUMBER: _ClassVar[int]
    salt: str
    def __init__(self, salt: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("dropped_blocks", "blocks_in_use", "pinned_prefixes")
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    PINNED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    dropped_blocks: int
    blocks_in_use: int
    pinned_prefixes: int
    def __init__(self, dropped_blocks: _Optional[int] = ..., blocks_in_use: _Optional[int] = ..., pinned_prefixes: _Optional[int] = ...) -> None: ...
