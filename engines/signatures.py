"""What is known of starts that stand still and of engines that die: signs, and what to do.

Pure: texts in, texts out. A stall's signs are functions and files of its stacks, lines of its log
and its phase; an ending's are lines of its log. Advice names the plan's keys.
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["out_of_memory", "port", "flag", "crash", "kernel", "missing", "stall", "deadline"]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A stall that is known by all signs it gives; one that is None is not asked for.

    `functions`: a function of a stack. `files`: the whole path of a stack's file. `log`: the log.
    `anywhere`: either of functions and log.
    """

    name: str
    advice: str
    anywhere: str | None = None
    functions: str | None = None
    files: str | None = None
    log: str | None = None
    phases: frozenset[str] = frozenset()


COLLECTIVE = (
    r"all_reduce|all_gather|reduce_scatter|broadcast|barrier|_object_list|ncclAllReduce|"
    r"ncclAllGather|ncclGroupEnd|ncclCommInitRank|cudaStreamSynchronize|\bsynchronize\b"
)

STALLS: tuple[Signature, ...] = (
    Signature(
        name="collective",
        anywhere=r"all_reduce|all_gather|reduce_scatter|broadcast|barrier|_object_list",
        advice="ranks that wait inside a collective wait for one that never came: look at the odd "
        "rank's stack; NCCL_DEBUG=INFO in engine.extra_env tells more",
    ),
    Signature(
        name="nccl_p2p",
        functions=COLLECTIVE,
        log=r"\bnccl==|NCCL version|NCCL INFO",
        advice="GPUs that reach each other over PCIe alone may hang in NCCL's peer-to-peer path, "
        "often where the IOMMU or ACS is on: NCCL_P2P_DISABLE=1 in engine.extra_env is the test "
        "for it (slower; if it starts so, mend the path and leave it out again)",
    ),
    Signature(
        name="rendezvous",
        anywhere=r"init_process_group|TCPStore|_store_based_barrier|rendezvous|connectFullMesh",
        advice="the ranks have not found each other: check the address and port they meet at, a "
        "firewall, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME on machines with several networks",
    ),
    Signature(
        name="custom_all_reduce",
        anywhere=r"custom_all_reduce|CustomAllreduce|register_graph_buffers",
        advice="the custom all-reduce hangs where GPUs cannot reach each other's memory: start "
        "with --disable-custom-all-reduce in engine.extra_args",
    ),
    Signature(
        name="after_the_weights",
        phases=frozenset({"weights_loaded"}),
        advice="SGLang standing still after its weights were loaded is known of Kimi-K2 models "
        "(sglang issue 15608), without one cure: change one thing at a time to find which it is, "
        "--disable-custom-all-reduce, then NCCL_P2P_DISABLE=1, then --attention-backend triton, "
        "then --disable-cuda-graph, and see `doctor --kernels` for kernels that this GPU lacks",
    ),
    Signature(
        name="shared_memory_broadcast",
        anywhere=r"No available shared memory broadcast block",
        advice="vLLM's engine core waits for a worker that does not come back: its stack tells why",
    ),
    Signature(
        name="download",
        anywhere=r"snapshot_download|http_get|hf_hub_download|urlopen|_download",
        advice="a download waits for the network: give a local folder as target.path, or set "
        "HF_HUB_OFFLINE=1",
    ),
    Signature(
        name="jit_lock",
        functions=r"filelock|FileLock|\bflock\b|_acquire|\bacquire\b|build_and_load",
        files=r"/(?:flashinfer|tvm_ffi|deep_gemm)/|/torch/utils/(?:cpp_extension|file_baton)",
        advice="a kernel's compilation waits for a lock that an earlier, killed start may have "
        "left: end what is left of it and remove the lock, for flashinfer under "
        "~/.cache/flashinfer, for torch under ~/.cache/torch_extensions",
    ),
    Signature(
        name="file_lock",
        anywhere=r"filelock|FileLock|\bflock\b|_acquire\b.*lock",
        advice="a file lock is held by another process: end what was left of an earlier start, or "
        "remove its lock file",
    ),
    Signature(
        name="compilation",
        anywhere=r"nvcc|ninja|load_inline|cpp_extension|jit_compile|build_and_load",
        advice="kernels are being compiled, or wait for another process's compilation to end",
    ),
)


def stall_advice(*, functions: str, files: str, log: str, phase: str) -> list[str]:
    """The advice of every signature whose signs are all there."""
    found = []
    for s in STALLS:
        asked = [
            (s.functions, functions),
            (s.files, files),
            (s.log, log),
            (s.anywhere, f"{functions}\n{log}"),
        ]
        fits = all(p is None or re.search(p, text, re.IGNORECASE) for p, text in asked)
        if fits and (not s.phases or phase in s.phases):
            found.append(s.advice)
    return found


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A way to die that is known by a line of the log. `says`: in a word or two, what it is."""

    kind: Kind
    pattern: str
    says: str
    advice: str


ENDINGS: tuple[Ending, ...] = (
    Ending(
        kind="flag",
        pattern=r"^.*\berror: (?:unrecognized arguments|argument -|ambiguous option|"
        r"the following arguments are required).*$",
        says="wrong flag",
        advice="correct engine.extra_args, or the profile that it comes from",
    ),
    Ending(
        kind="port",
        pattern=r"^.*(?:[Aa]ddress already in use|EADDRINUSE).*$",
        says="port taken",
        advice="another process listens there since the start: end it, or give another engine.port",
    ),
    Ending(
        kind="out_of_memory",
        pattern=r"^.*(?:CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|"
        r"cudaErrorMemoryAllocation|NCCL.*out of memory).*$",
        says="out of GPU memory",
        advice="lower engine.kv_cache_gib, engine.max_model_len or engine.max_num_seqs, raise "
        "engine.tensor_parallel, and see with nvidia-smi that nothing else holds the GPUs' memory",
    ),
    Ending(
        kind="out_of_memory",
        pattern=r"^.*(?:No available memory for the cache blocks|Not enough memory\. Please try|"
        r"is larger than the (?:maximum number of tokens|available KV cache memory)|"
        r"larger than the available KV cache|less than desired GPU memory utilization).*$",
        says="no room for the KV cache",
        advice="lower engine.max_model_len or engine.max_num_seqs, raise engine.kv_cache_gib or "
        "engine.tensor_parallel, and see that nothing else holds the memory",
    ),
    Ending(
        kind="out_of_memory",
        pattern=r"^.*(?:No space left on device.*shm|/dev/shm.*(?:No space|too small)|"
        r"unable to (?:open|allocate) shared memory|insufficient shared memory).*$",
        says="out of shared memory",
        advice="enlarge /dev/shm (of a container: --shm-size, or --ipc=host)",
    ),
    Ending(
        kind="out_of_memory",
        pattern=r"^(?:.*\bMemoryError\b.*|.*can't allocate memory.*|.*Cannot allocate memory.*|"
        r".*std::bad_alloc.*)$",
        says="out of memory",
        advice="lower engine.kv_cache_gib, see what else holds the machine's memory, or raise the "
        "limit (ulimit -v, a control group's)",
    ),
    Ending(
        kind="kernel",
        pattern=r"^.*(?:no kernel image is available|named symbol not found|"
        r"PTX was compiled with an unsupported toolchain).*$",
        says="no kernel for this GPU",
        advice="`python -m harness doctor --kernels PATH --arch CC` tells what the engine's "
        "kernels have code for: choose another backend, or build them",
    ),
    Ending(
        kind="missing",
        pattern=r"^.*(?:Found no NVIDIA driver|driver version is insufficient|"
        r"No CUDA GPUs are available|no NVIDIA GPU detected).*$",
        says="no usable GPU",
        advice="check nvidia-smi and CUDA_VISIBLE_DEVICES, or serve with engine.device=cpu",
    ),
    Ending(
        kind="missing",
        pattern=r"^.*(?:SafetensorError|Error while deserializing header|incomplete metadata).*$",
        says="a broken checkpoint file",
        advice="fetch the checkpoint's files anew and compare their sizes with its index",
    ),
    Ending(
        kind="crash",
        pattern=r"^.*(?:NCCL error|ncclUnhandledCudaError|ncclSystemError|ncclInternalError).*$",
        says="NCCL failed",
        advice="NCCL_DEBUG=INFO in engine.extra_env tells which call; NCCL_P2P_DISABLE=1 is the "
        "test for GPUs that do not reach each other's memory; /dev/shm may be too small",
    ),
)


def ending_of(cause: str | None, log: str) -> tuple[Ending, str] | None:
    """What the engine died of, if that is known, and the line that says so.

    The log is searched only where no cause was found in it: lines that were survived are no cause.
    """
    # A progress bar's lines end in a carriage return alone, the last before an error too.
    text = (log if cause is None else cause).replace("\r", "\n")
    for ending in ENDINGS:
        found = re.search(ending.pattern, text, re.MULTILINE)
        if found is not None:
            return ending, found.group(0).strip()
    return None


SIGNALS: dict[str, str] = {
    "SIGSEGV": "its native code read where it may not: the log's last stack tells where",
    "SIGABRT": "its native code gave up: the log's last lines tell why",
    "SIGBUS": "memory that a file stands for could not be had: /dev/shm or a disk is full "
    "(of a container: --shm-size), or a mapped checkpoint file became shorter",
    "SIGILL": "an instruction that this CPU lacks: a package was built for another one",
    "SIGFPE": "its native code divided by zero: the log's last stack tells where",
}
"""What a signal that a process dies of by itself says."""


def crash_place(log: str) -> str | None:
    """Where Python was when its native code crashed, by its fault handler's stack in the log."""
    found = re.search(
        r"Fatal Python error: ([^\n]+)\n.*?\(most recent call first\):\n"
        r'\s+File "([^"]+)", line (\d+) in (\S+)',
        log,
        re.DOTALL,
    )
    if found is None:
        return None
    what, path, line, function = found.groups()
    return f"{what.strip()} in {function} ({path.rpartition('/')[2]}:{line})"


def worker_signal(text: str) -> str | None:
    """The signal that a worker died of, where its parent's message gives its exit code."""
    found = re.search(r"exit ?code:? -(\d+)", text, re.IGNORECASE)
    if found is None or int(found[1]) not in {int(s) for s in signal.Signals}:
        return None
    return signal.Signals(int(found[1])).name


@dataclass(frozen=True, kw_only=True)
class Death:
    """Why an engine died: its own line, of what kind that is, and what to do about it."""

    cause: str | None
    kind: Kind | None
    advice: str | None


def cause_of(log: str, cause: str | None, *, signal_name: str | None, starved: str | None) -> Death:
    """Put together what the log, the signal and the kernel's counters tell of a death.

    `cause` is what the adapter found in the log, `starved` what the kernel killed meanwhile.
    """
    worker = signal_name is None and worker_signal(cause or log)
    signal_name = worker or signal_name
    if starved is not None and (signal_name == "SIGKILL" or cause is None):
        advice = f"{starved}: lower engine.kv_cache_gib, or raise the limit"
        return Death(cause=cause, kind="out_of_memory", advice=advice)
    if signal_name in SIGNALS:
        return Death(cause=crash_place(log) or cause, kind="crash", advice=SIGNALS[signal_name])
    if worker:
        hint = " (often: out of memory)" if worker == "SIGKILL" else ""
        return Death(cause=cause, kind="crash", advice=f"a worker was ended by {worker}{hint}")
    known = ending_of(cause, log)
    if known is None:
        return Death(cause=cause, kind="crash" if signal_name else None, advice=starved)
    ending, line = known
    near = nearest_flags(line, log) if ending.kind == "flag" else None
    return Death(
        cause=cause or line,
        kind=ending.kind,
        advice=f"{ending.says}: {f'{near}; ' if near else ''}{ending.advice}",
    )


def nearest_flags(line: str, log: str) -> str | None:
    """For each unknown flag of an argument parser's error its nearest, by the usage in the log."""
    told = re.search(r"unrecognized arguments: (.*)$", line)
    if told is None:
        return None
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", log[: log.find(told.group(0))]))
    pairs = []
    for flag in re.findall(r"(?<!\S)--[\w-]+", told.group(1)):
        near = difflib.get_close_matches(flag, known - {flag}, n=1, cutoff=0.75)
        pairs += [f"{flag} may be meant as {near[0]}"] if near else []
    return ", ".join(pairs) or None


SHOWN_LINES = 8
"""So many lines of a failure's log are shown."""


def relevant_lines(log: str, cause: str | None, most: int) -> tuple[str, ...]:
    """The last lines of a log; where its cause stands above those shown, the lines around it."""
    lines = [line[:2000] for line in re.split(r"[\r\n]+", log) if line.strip()]
    place = _place(lines, cause)
    if place is None or place >= len(lines) - SHOWN_LINES:
        return tuple(lines[-most:])
    around = lines[max(0, place - 3) : place + 2]
    return (*around, "[...]", *lines[-(SHOWN_LINES - len(around) - 1) :])


def _place(lines: Iterable[str], cause: str | None) -> int | None:
    words = (cause or "").strip()[:80]
    if not words:
        return None
    return next((i for i, line in enumerate(lines) if words in line), None)
