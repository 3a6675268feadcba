# cython: language_level=3, embedsignature=True
"""Bridge to the CPU runtime of kernels/cpu: threads, queue, kernel tables, memory.

Everything here is thin: lifetimes are owned by these objects, the GIL is released around work, and a wait wakes up
twenty times a second so that Ctrl-C gets through.
"""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

import numpy as np

from lily.errors import HostError

cdef extern from "abi.h" namespace "lily":
    uint32_t kAbiVersion
    ctypedef unsigned char byte "std::byte"
    struct CBuffer "lily::Buffer":
        byte* data
        uint64_t size
    struct Kernel:
        const char* name
        uint32_t buffer_count
        uint32_t constants_size
    struct KernelTable:
        uint32_t abi_version
        uint32_t count
        const Kernel* kernels

cdef extern from "isa.h" namespace "lily":
    cppclass InstructionSet:
        const char* name
        const KernelTable* (*table)() noexcept
        cbool (*supported)() noexcept
    const vector[InstructionSet]& instruction_sets()

cdef extern from "runtime.h" namespace "lily":
    struct DispatchRecord:
        pass
    struct BindingRecord:
        pass
    cppclass NativePlan:
        NativePlan() except +
        string build(const DispatchRecord*, size_t, const BindingRecord*, size_t, const byte*, size_t,
                     const vector[const Kernel*]&) except +
    enum class RunState:
        kQueued
        kDone
        kCancelled
    cppclass Runtime:
        Runtime(uint32_t) except +
        uint64_t submit(shared_ptr[NativePlan], const vector[CBuffer]&, string&) except + nogil
        cbool wait(uint64_t, double, RunState&) except + nogil
        void cancel() except + nogil
        uint32_t threads()

cdef extern from "memory.h" namespace "lily":
    void* allocate_pages(size_t bytes, cbool huge) nogil
    void free_pages(void* address, size_t bytes) nogil
    void* load_library(const char* path, string& error) except +

ctypedef const KernelTable* (*TableFunction)() noexcept


def isa_names():
    """Instruction sets built in, best first, each with whether this processor runs it."""
    cdef size_t i
    cdef const vector[InstructionSet]* sets = &instruction_sets()
    return [(sets[0][i].name.decode(), bool(sets[0][i].supported())) for i in range(sets[0].size())]


cdef class Memory:
    """Anonymous zeroed pages, or a view of somebody else's array; ``view`` is the bytes as a numpy array."""

    cdef byte* data
    cdef readonly uint64_t nbytes
    cdef readonly str name
    cdef bint owned
    cdef object keeper

    def __cinit__(self, uint64_t nbytes, str name, array=None):
        cdef const unsigned char[::1] source
        self.nbytes = nbytes
        self.name = name
        self.owned = array is None
        if array is None:
            self.data = <byte*> allocate_pages(max(nbytes, 1), nbytes >= (1 << 22))
            if self.data == NULL:
                raise HostError(f"the system has no {nbytes} bytes of memory left for {name}")
        elif nbytes:
            source = array
            self.keeper = array
            self.data = <byte*> &source[0]

    def __dealloc__(self):
        if self.owned and self.data != NULL:
            free_pages(self.data, max(self.nbytes, 1))

    @property
    def view(self):
        """The bytes as a writable uint8 array (read-only for a bound array)."""
        if not self.owned:
            return self.keeper
        if self.nbytes == 0:
            return np.zeros(0, np.uint8)
        cdef unsigned char[::1] window = <unsigned char[:self.nbytes]> <unsigned char*> self.data
        array = np.asarray(window)
        return _keep(array, self)


class _Kept(np.ndarray):
    """An array that keeps its Memory alive."""


def _keep(array, owner):
    kept = array.view(_Kept)
    kept.owner = owner
    return kept


cdef class CpuPlan:
    """A plan's flat arrays with kernels resolved."""

    cdef shared_ptr[NativePlan] native


cdef class CpuRuntime:
    """Threads and kernels of one host.

    Args:
        threads: worker threads, 1 or more.
        isa: an instruction set of :func:`isa_names` that this processor runs.
    """

    cdef Runtime* runtime
    cdef vector[const Kernel*] kernels
    cdef readonly dict kernel_ids
    cdef readonly str isa

    def __cinit__(self, int threads, str isa):
        cdef const vector[InstructionSet]* sets = &instruction_sets()
        cdef const KernelTable* table = NULL
        cdef size_t i
        for i in range(sets[0].size()):
            if sets[0][i].name.decode() == isa and sets[0][i].supported():
                table = sets[0][i].table()
        if table == NULL:
            raise HostError(f"instruction set {isa!r} is not one this processor runs")
        self.isa = isa
        self.kernel_ids = {}
        self._add(table, "lily")
        self.runtime = new Runtime(threads)

    def __dealloc__(self):
        cdef Runtime* runtime = self.runtime
        self.runtime = NULL
        if runtime != NULL:
            with nogil:
                del runtime

    cdef _add(self, const KernelTable* table, str owner):
        cdef uint32_t i
        if table.abi_version != kAbiVersion:
            raise HostError(f"kernels of {owner} were built for interface {table.abi_version}, this Lily has {kAbiVersion}")
        for i in range(table.count):
            name = table.kernels[i].name.decode()
            if name in self.kernel_ids:
                raise HostError(f"kernel {name} of {owner} is already provided")
            self.kernel_ids[name] = self.kernels.size()
            self.kernels.push_back(&table.kernels[i])

    def load_library(self, path):
        """Add a plugin's kernels: a shared library that exports ``lily_kernels``."""
        cdef string error
        cdef void* symbol = load_library(str(path).encode(), error)
        if symbol == NULL:
            raise HostError(f"{path}: {error.decode()}")
        self._add((<TableFunction> symbol)(), str(path))

    @property
    def threads(self):
        return self.runtime.threads()

    def build(self, dispatches, bindings, constants):
        """A CpuPlan from the arrays of :func:`lily.plan.pack`."""
        cdef const unsigned char[::1] rows = dispatches.view(np.uint8)
        cdef const unsigned char[::1] bound = bindings.view(np.uint8)
        cdef const unsigned char[::1] blob = constants
        cdef CpuPlan plan = CpuPlan()
        plan.native = make_shared[NativePlan]()
        cdef string problem = plan.native.get().build(
            <const DispatchRecord*> &rows[0], len(dispatches), <const BindingRecord*> &bound[0], len(bindings),
            <const byte*> &blob[0], blob.shape[0], self.kernels)
        if not problem.empty():
            raise HostError(problem.decode())
        return plan

    def submit(self, CpuPlan plan, list buffers):
        """Queue a run with ``buffers`` (Memory) in the slots; returns a ticket for :meth:`wait`."""
        cdef vector[CBuffer] slots
        cdef CBuffer slot
        cdef Memory memory
        cdef string error
        cdef uint64_t ticket
        for memory in buffers:
            slot.data = memory.data
            slot.size = memory.nbytes
            slots.push_back(slot)
        cdef shared_ptr[NativePlan] native = plan.native
        with nogil:
            ticket = self.runtime.submit(native, slots, error)
        if ticket == 0:
            raise HostError(error.decode())
        return ticket

    def wait(self, uint64_t ticket, bint interruptible):
        """Wait for a run; if interruptible, Ctrl-C cancels it and all that is queued before KeyboardInterrupt goes on."""
        cdef RunState state = RunState.kQueued
        cdef cbool over = False
        try:
            while not over:
                with nogil:
                    over = self.runtime.wait(ticket, 0.05, state)
                if not over and interruptible:
                    _check_signals()
        except BaseException:
            self.cancel()
            raise
        if state == RunState.kCancelled:
            raise HostError("the run was cancelled")

    def cancel(self):
        """End the running plan within one chunk of tasks and drop the queue."""
        with nogil:
            self.runtime.cancel()


cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1


def _check_signals():
    PyErr_CheckSignals()
