"""One client of the virtual device: its requests, its memory, its graphs."""

import socket
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from linkcpp.dispatch.experts import EarlyResult, ExpertRunner
from linkcpp.dispatch.memory import (
    RequestError,
    VirtualMemory,
    tensor_fields,
    without_address,
)
from linkcpp.dispatch.placing import TensorPlaces
from linkcpp.dispatch.program import (
    Binder,
    BoundCall,
    Program,
    compile_program,
)
from linkcpp.dispatch.reading import RequestReader
from linkcpp.dispatch.shared_device import SharedDevice
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.rpc_socket import limit_sending, send_all
from linkcpp.engine.wire import (
    Buffer,
    Command,
    Limits,
    Message,
    WireError,
    answer_header,
    encode_answer,
)

_MAX_PROGRAMS = 4096
_MAX_KNOWN_RANGES = 64
# Far more than the rows of any batch; weights, which nobody asks for again, are larger.
_MAX_KNOWN_BYTES = 1 << 27
_STALL_SECONDS = 60.0
_REPLY_BYTES = 1 << 22
_QUEUE_BYTES = 1 << 20
_LIMITS = Limits(set_tensor_bytes=1 << 30, graph_bytes=1 << 26)


class Session:
    """One client and what it allocated; ``let_in`` is told once it speaks the protocol.

    Nothing of it may refer back to it: so all of it goes as soon as the client does, and not when
    Python next looks for cycles, which an idle process never does.
    """

    def __init__(
        self,
        device: SharedDevice,
        client: socket.socket,
        let_in: Callable[[socket.socket], None],
    ) -> None:
        self._device = device
        self._let_in = let_in
        self._socket = client
        self._requests = RequestReader(client, _LIMITS)
        self._memory = VirtualMemory(device.backing)
        self._programs: OrderedDict[bytes, Program] = OrderedDict()
        self._places = TensorPlaces(self._memory, device.backing.dialect)
        self._replies: list[Buffer] = []
        self._reply_bytes = 0
        self._program: Program | None = None
        # The last graph's result, as long as nothing else was asked for since.
        self._early: EarlyResult | None = None
        self._experts = ExpertRunner(device)
        # What this client put where since the last command that is not a SET.
        self._known: dict[int, bytes] = {}

    def run(self) -> None:
        """Serve until the client leaves.

        Raises:
            OSError: it broke off or stalls.
            LinkcppError: it asked for what cannot be.
        """
        limit_sending(self._socket, _STALL_SECONDS)
        while (requests := self._requests.read()) is not None:
            with self._device.lock:
                if self._device.failure is not None:
                    return
                try:
                    self._handle(requests)
                except WireError as error:
                    self._device.fail(error)
                    return
            self._let_in(self._socket)
            # A large one must not stay while the client has nothing to ask.
            requests.clear()
            self._send_replies()
            if self._early is not None:
                self._catch_up()

    def _handle(self, requests: Sequence[Message]) -> None:
        for command, payload in requests:
            if command != Command.GET_TENSOR:
                self._early = None
            _HANDLERS[command](self, payload)
            if self._reply_bytes > _REPLY_BYTES:
                self._send_replies()
        # Whatever is wanted back comes with a request of its own, and what was queued leaves with
        # that: one write, and the backing server wakes once.
        if self._device.backing.queued_bytes > _QUEUE_BYTES:
            self._device.backing.flush()

    def _catch_up(self) -> None:
        """Let the backing server do what the client was already told, while the client goes on."""
        with self._device.lock:
            if self._device.failure is not None:
                return
            try:
                self._device.backing.flush()
            except WireError as error:
                self._device.fail(error)

    def close(self) -> None:
        """Free what the client allocated."""
        device = self._device
        with device.lock:
            if device.failure is not None:
                return
            try:
                self._memory.free_all()
                device.backing.flush()
            except WireError as error:
                device.fail(error)

    def _reply(self, payload: Buffer) -> None:
        self._replies += (answer_header(len(payload)), payload)
        self._reply_bytes += len(payload) + 8

    def _send_replies(self) -> None:
        if not self._replies:
            return
        replies, self._replies, self._reply_bytes = self._replies, [], 0
        send_all(self._socket, replies)

    def _fixed(self, command: Command) -> bytes:
        return self._device.fixed_answers[command]

    def _hello(self, _: memoryview) -> None:
        self._requests.speak(self._device.backing.dialect)
        self._reply(self._fixed(Command.HELLO))

    def _device_count(self, _: memoryview) -> None:
        self._reply(self._fixed(Command.DEVICE_COUNT))

    def _alignment(self, payload: memoryview) -> None:
        self._query(Command.GET_ALIGNMENT, payload)

    def _max_size(self, payload: memoryview) -> None:
        self._query(Command.GET_MAX_SIZE, payload)

    def _query(self, command: Command, payload: memoryview) -> None:
        self._check_device(messages.DEVICE_INDEX.parse(payload).device)
        self._reply(self._fixed(command))

    def _check_device(self, device: int) -> None:
        if device:
            raise RequestError(f"There is no device {device}.")

    def _device_memory(self, payload: memoryview) -> None:
        self._check_device(messages.DEVICE_INDEX.parse(payload).device)
        self._reply(self._device.backing.call(Command.GET_DEVICE_MEMORY, payload))

    def _alloc_buffer(self, payload: memoryview) -> None:
        request = messages.ALLOC_BUFFER.parse(payload)
        self._check_device(request.device)
        handle = self._memory.allocate(request.size_bytes)
        answer = messages.AllocatedBuffer(handle, request.size_bytes)
        self._reply(messages.ALLOCATED_BUFFER.build(answer))

    def _own(self, payload: memoryview) -> int:
        handle = messages.BUFFER_POINTER.parse(payload).buffer
        self._memory.check(handle)
        return handle

    def _buffer_base(self, payload: memoryview) -> None:
        self._reply(messages.NUMBER.build(messages.Number(self._own(payload))))

    def _free_buffer(self, payload: memoryview) -> None:
        handle = self._own(payload)
        self._known.clear()
        self._programs.clear()
        self._program = None
        self._places.forget()
        self._memory.free(handle)
        self._acknowledge(Command.FREE_BUFFER)

    def _clear_buffer(self, payload: memoryview) -> None:
        request = messages.BUFFER_CLEAR.parse(payload)
        self._known.clear()
        place = self._memory.real(self._own(payload[:8]))
        real = messages.BUFFER_CLEAR.build(messages.BufferClear(place.buffer, request.value))
        self._device.backing.call(Command.BUFFER_CLEAR, real)
        self._acknowledge(Command.BUFFER_CLEAR)

    def _acknowledge(self, command: Command) -> None:
        """Answer a command that has an (empty) answer in one of the dialects only."""
        if self._device.backing.dialect.is_answered(command):
            self._replies.append(encode_answer())

    def _alloc_size(self, payload: memoryview) -> None:
        request = messages.GET_ALLOC_SIZE.parse(payload)
        self._check_device(request.device)
        tensor_fields(request.tensor)
        real = messages.GET_ALLOC_SIZE.build(
            messages.GetAllocSize(
                0, without_address(request.tensor), without_address(request.sources)
            )
        )
        self._reply(self._device.backing.call(Command.GET_ALLOC_SIZE, real))

    def _init_tensor(self, payload: memoryview) -> None:
        placed = self._places.find(bytes(payload))
        if placed is not None:
            self._device.backing.call(Command.INIT_TENSOR, placed.record)
        self._acknowledge(Command.INIT_TENSOR)

    def _set_tensor(self, payload: memoryview) -> None:
        data = payload[self._device.backing.dialect.set_tensor_head_bytes :]
        head = self._places.set_head(payload)
        if head is None:
            self._device.counters.dropped_bytes += len(data)
            return
        kept = bytes(data)
        self._device.backing.queue(head.request, kept)
        self._remember(head.address, kept)

    def _remember(self, address: int, data: bytes) -> None:
        """Keep what is at an address; anything that it overlaps is no longer known."""
        end = address + len(data)
        for start, old in list(self._known.items()):
            if start < end and address < start + len(old):
                del self._known[start]
        known_bytes = sum(map(len, self._known.values())) + len(data)
        if len(self._known) < _MAX_KNOWN_RANGES and known_bytes <= _MAX_KNOWN_BYTES:
            self._known[address] = data

    def _set_tensor_hash(self, payload: memoryview) -> None:
        is_expert = self._places.find(messages.TENSOR_HASH.parse(payload).tensor) is None
        # Of anything else nothing is known by its hash, so it will be sent.
        self._reply(messages.RESULT.build(messages.Result(int(is_expert))))

    def _memset_tensor(self, payload: memoryview) -> None:
        request = messages.MEMSET_TENSOR.parse(payload)
        self._known.clear()
        placed = self._places.part(request.tensor, request.offset, request.size_bytes)
        if placed is not None:
            real = messages.MEMSET_TENSOR.build(messages.MemsetTensor(placed.record, *request[1:]))
            self._device.backing.call(Command.MEMSET_TENSOR, real)

    def _get_tensor(self, payload: memoryview) -> None:
        wanted = self._places.get_request(payload)
        early = self._early
        if early is not None and early.is_at(wanted.address, wanted.size_bytes):
            self._device.counters.early_count += 1
            self._reply(early.data)
            return
        backing = self._device.backing
        backing.queue(wanted.request)
        self._reply(backing.receive(wanted.size_bytes))

    def _copy_tensor(self, payload: memoryview) -> None:
        request = messages.COPY_TENSOR.parse(payload)
        self._known.clear()
        real = messages.CopyTensor(
            self._places.whole(request.source).record,
            self._places.whole(request.destination).record,
        )
        answer = self._device.backing.call(Command.COPY_TENSOR, messages.COPY_TENSOR.build(real))
        self._reply(answer)

    def _graph_compute(self, payload: memoryview) -> None:
        key = bytes(payload)
        last = self._program
        program = last.follower() if last is not None and last.follower is not None else None
        if program is None or program.payload != key:
            program = self._programs.get(key) or self._compile(key)
            if last is not None:
                last.follower = weakref.ref(program)
        self._program = program
        self._run_program(program)

    def _compile(self, payload: bytes) -> Program:
        device = self._device
        binder = Binder(self._memory, device.ops, device.backing.dialect, device.swarm.learn)
        program = compile_program(payload, binder)
        device.counters.compiled_count += 1
        self._programs[payload] = program
        if len(self._programs) > _MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return program

    def _graph_recompute(self, payload: memoryview) -> None:
        self._check_device(messages.DEVICE_INDEX.parse(payload).device)
        if self._program is None:
            raise RequestError("GRAPH_RECOMPUTE came before any graph.")
        self._run_program(self._program)

    def _run_program(self, program: Program) -> None:
        known, self._known = self._known, {}
        self._device.counters.graph_count += 1
        early = None
        for step in program.steps:
            if isinstance(step, BoundCall):
                early = self._experts.run(step, known)
                known = {}
            else:
                self._device.backing.queue(step)
        if early is not None and self._experts.is_right(early, program.run_count):
            self._early = early
        program.run_count += 1


_HANDLERS: Mapping[Command, Callable[[Session, memoryview], None]] = {
    Command.HELLO: Session._hello,
    Command.DEVICE_COUNT: Session._device_count,
    Command.GET_ALIGNMENT: Session._alignment,
    Command.GET_MAX_SIZE: Session._max_size,
    Command.GET_DEVICE_MEMORY: Session._device_memory,
    Command.ALLOC_BUFFER: Session._alloc_buffer,
    Command.BUFFER_GET_BASE: Session._buffer_base,
    Command.FREE_BUFFER: Session._free_buffer,
    Command.BUFFER_CLEAR: Session._clear_buffer,
    Command.GET_ALLOC_SIZE: Session._alloc_size,
    Command.INIT_TENSOR: Session._init_tensor,
    Command.SET_TENSOR: Session._set_tensor,
    Command.SET_TENSOR_HASH: Session._set_tensor_hash,
    Command.MEMSET_TENSOR: Session._memset_tensor,
    Command.GET_TENSOR: Session._get_tensor,
    Command.COPY_TENSOR: Session._copy_tensor,
    Command.GRAPH_COMPUTE: Session._graph_compute,
    Command.GRAPH_RECOMPUTE: Session._graph_recompute,
}
