from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolBlock(_message.Message):
    __slots__ = ("key", "namespace", "sizes", "digests")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    namespace: str
    sizes: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    def __init__(self, key: _Optional[bytes] = ..., namespace: _Optional[str] = ..., sizes: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("blocks", "payload", "address", "memory")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[PoolBlock]
    payload: bytes
    address: int
    memory: bytes
    def __init__(self, blocks: _Optional[_Iterable[_Union[PoolBlock, _Mapping]]] = ..., payload: _Optional[bytes] = ..., address: _Optional[int] = ..., memory: _Optional[bytes] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: int
    def __init__(self, taken: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("keys", "pin_seconds")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    pin_seconds: float
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., pin_seconds: _Optional[float] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, found: _Optional[_Iterable[bool]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("keys", "first_part", "last_part", "transport", "offer", "buffers", "buffer_size")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PART_FIELD_NUMBER: _ClassVar[int]
    LAST_PART_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_SIZE_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    first_part: int
    last_part: int
    transport: str
    offer: bytes
    buffers: _containers.RepeatedScalarFieldContainer[int]
    buffer_size: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., first_part: _Optional[int] = ..., last_part: _Optional[int] = ..., transport: _Optional[str] = ..., offer: _Optional[bytes] = ..., buffers: _Optional[_Iterable[int]] = ..., buffer_size: _Optional[int] = ...) -> None: ...

class GetMessage(_message.Message):
    __slots__ = ("request", "freed_buffer")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FREED_BUFFER_FIELD_NUMBER: _ClassVar[int]
    request: GetRequest
    freed_buffer: int
    def __init__(self, request: _Optional[_Union[GetRequest, _Mapping]] = ..., freed_buffer: _Optional[int] = ...) -> None: ...

class Slab(_message.Message):
    __slots__ = ("part", "indices", "sizes", "digests", "payload", "buffer", "buffer_bytes", "end")
    PART_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    part: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    payload: bytes
    buffer: int
    buffer_bytes: int
    end: bool
    def __init__(self, part: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., buffer: _Optional[int] = ..., buffer_bytes: _Optional[int] = ..., end: _Optional[bool] = ...) -> None: ...

class Selection(_message.Message):
    __slots__ = ("namespace", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class TierStat(_message.Message):
    __slots__ = ("tier", "capacity", "bytes", "blocks", "hits", "bytes_read", "bytes_written", "evictions", "corrupt", "read_seconds", "eviction_age_seconds")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    capacity: int
    bytes: int
    blocks: int
    hits: int
    bytes_read: int
    bytes_written: int
    evictions: int
    corrupt: int
    read_seconds: float
    eviction_age_seconds: float
    def __init__(self, tier: _Optional[str] = ..., capacity: _Optional[int] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., evictions: _Optional[int] = ..., corrupt: _Optional[int] = ..., read_seconds: _Optional[float] = ..., eviction_age_seconds: _Optional[float] = ...) -> None: ...

class NamespaceStat(_message.Message):
    __slots__ = ("namespace", "bytes", "blocks", "quota")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    bytes: int
    blocks: int
    quota: int
    def __init__(self, namespace: _Optional[str] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., quota: _Optional[int] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolStat(_message.Message):
    __slots__ = ("name", "instance", "address", "tiers", "namespaces", "lookups", "found", "stored", "refused", "pinned", "backlog", "draining")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance: str
    address: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierStat]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStat]
    lookups: int
    found: int
    stored: int
    refused: int
    pinned: int
    backlog: int
    draining: bool
    def __init__(self, name: _Optional[str] = ..., instance: _Optional[str] = ..., address: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStat, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStat, _Mapping]]] = ..., lookups: _Optional[int] = ..., found: _Optional[int] = ..., stored: _Optional[int] = ..., refused: _Optional[int] = ..., pinned: _Optional[int] = ..., backlog: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class PoolEntry(_message.Message):
    __slots__ = ("key", "namespace", "bytes", "tiers", "age_seconds", "pinned")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    namespace: str
    bytes: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    age_seconds: float
    pinned: bool
    def __init__(self, key: _Optional[bytes] = ..., namespace: _Optional[str] = ..., bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., age_seconds: _Optional[float] = ..., pinned: _Optional[bool] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("read", "corrupt")
    READ_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    read: int
    corrupt: int
    def __init__(self, read: _Optional[int] = ..., corrupt: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolEvent(_message.Message):
    __slots__ = ("kind", "keys", "sequence")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    sequence: int
    def __init__(self, kind: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., sequence: _Optional[int] = ...) -> None: ...
