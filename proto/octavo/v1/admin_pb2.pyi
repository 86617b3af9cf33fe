from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("waiting", "running", "frontends", "workers", "preemptions", "dropped_messages")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FRONTENDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    frontends: int
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    preemptions: int
    dropped_messages: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., frontends: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., preemptions: _Optional[int] = ..., dropped_messages: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("id", "device", "model", "running", "blocks_total", "blocks_free", "block_size", "steps", "tokens_computed", "tokens_sampled", "times", "blocks_cached")
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
    def __init__(self, id: _Optional[str] = ..., device: _Optional[str] = ..., model: _Optional[str] = ..., running: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., block_size: _Optional[int] = ..., steps: _Optional[int] = ..., tokens_computed: _Optional[int] = ..., tokens_sampled: _Optional[int] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ..., blocks_cached: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("prepare_us", "model_us", "sample_us")
    PREPARE_US_FIELD_NUMBER: _ClassVar[int]
    MODEL_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    prepare_us: int
    model_us: int
    sample_us: int
    def __init__(self, prepare_us: _Optional[int] = ..., model_us: _Optional[int] = ..., sample_us: _Optional[int] = ...) -> None: ...
