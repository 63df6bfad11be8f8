"""Take rights away from a process: files by namespaces or Landlock, system calls by seccomp, resources by limits.

Like all of the sandbox that runs around programs, this uses only the standard library and imports nothing of dapo.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Sequence

NAMESPACES, LANDLOCK, NONE = "namespaces", "landlock", "none"
SCRATCH = "/tmp"
SCRATCH_BYTES = 64 * 2**20
MAX_FILES = 64  # open at once

_UNSHARED = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000  # user, mount, net, ipc, uts
_NEWNS = 0x00020000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PDEATHSIG, _NO_NEW_PRIVS, _SECCOMP = 1, 38, 22  # prctl
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3  # Landlock rights

# System calls that a program may make: number on x86_64, number on aarch64 (None: not there). It can compute, read and
# write its files, start threads and wait. It cannot start processes or programs, open sockets, signal or trace others,
# change modes, owners or its own limits, or reach the parts of the kernel that exploits like best.
_CALLS: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "access": (21, None), "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124),
    "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "nanosleep": (35, 101),
    "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160),
    "ftruncate": (77, 46), "getcwd": (79, 17), "chdir": (80, 49), "rename": (82, None),
    "mkdir": (83, None), "rmdir": (84, None), "unlink": (87, None), "readlink": (89, None), "umask": (95, 166),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "exit_group": (231, 94), "openat": (257, 56), "mkdirat": (258, 34),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "readlinkat": (267, 78),
    "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99),
    "epoll_pwait": (281, 22), "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24),
    "pipe2": (293, 59), "renameat2": (316, 276), "getrandom": (318, 278), "statx": (332, 291), "rseq": (334, 293),
    "close_range": (436, 436), "faccessat2": (439, 439),
}  # fmt: skip
# Calls that depend on an argument: its place, and the values or the bit that are allowed. Without a value: our own id.
_CONDITIONS: dict[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    "clone": ((56, 220), 0, (0x10000,)),  # CLONE_THREAD, a bit: threads, but no processes
    "tgkill": ((234, 131), 0, ()),  # signals to itself, which abort() needs
    "prlimit64": ((302, 261), 0, (0,)),  # its own limits; raising them needs a capability
    # Neither owners nor signals (F_SETOWN, F_SETSIG, FIOSETOWN): a pipe could be made to kill another process.
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)),  # TCGETS, window size, FIONREAD, close on exec
}
# What else differs between the machines: (column of the tables, AUDIT_ARCH, pivot_root).
_MACHINES = {"x86_64": (0, 0xC000003E, 155), "aarch64": (1, 0xC00000B7, 41)}


class Confinement:
    """One way to isolate programs. It is prepared once, in the process that starts them, and applied in each of them.

    The constructor raises OSError where the machine does not offer this kind of isolation.
    """

    def __init__(self, kind: str, readable: Sequence[str], memory: int) -> None:
        self.kind = kind
        self.memory = memory
        self.ruleset = -1
        if kind == NONE:
            return
        if sys.platform != "linux" or platform.machine() not in _MACHINES:
            raise OSError(f"there is no sandbox for {sys.platform} on {platform.machine()}")
        self.libc = ctypes.CDLL(None, use_errno=True)
        if kind == NAMESPACES:
            self._enter_namespaces([path for path in readable if os.path.exists(path)])
        else:
            self._build_ruleset([path for path in readable if os.path.exists(path)])

    def apply(self, cpu_seconds: int) -> None:
        """Confine this process. The order matters: each step needs rights that a later one takes away."""
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, SCRATCH_BYTES)
        _limit(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)  # SIGXCPU, a second later SIGKILL
        if sys.platform == "linux":
            _limit(resource.RLIMIT_AS, self.memory)
        if self.kind != NONE:
            self._prctl(_PDEATHSIG, signal.SIGKILL)  # die with the process that started this one
            if self.kind == NAMESPACES:
                # A scratch directory of its own, that vanishes with the process.
                self._call("unshare", _NEWNS)
                self._mount("tmpfs", SCRATCH, "tmpfs", _NOSUID | _NODEV, f"size={SCRATCH_BYTES},nr_inodes=4096")
                os.chdir(SCRATCH)
            # Give up all capabilities: root in a container has some, and every user has them in a user namespace.
            self._call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))
            self._prctl(_NO_NEW_PRIVS, 1)
            if self.kind == LANDLOCK:
                self._syscall(446, self.ruleset, 0)  # landlock_restrict_self
                os.close(self.ruleset)
            self._filter_calls()
        _limit(resource.RLIMIT_NOFILE, MAX_FILES)

    # Files, seen through a root of our own

    def _enter_namespaces(self, readable: Sequence[str]) -> None:
        """Move to new namespaces, with a root directory that holds read-only views of `readable` and nothing else.

        The network namespace has no interface but a loopback that is down.
        """
        uid, gid = os.geteuid(), os.getegid()
        self._call("unshare", _UNSHARED)
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as map_file:
                map_file.write(text)
        self._mount(None, "/", None, _REC | _PRIVATE)
        root = SCRATCH  # any directory will do: it is covered, and the old root disappears
        os.makedirs(SCRATCH, exist_ok=True)
        views = [path for path in readable if not any(path.startswith(f"{other}/") for other in readable)]
        sources = {path: os.open(path, os.O_PATH) for path in views}  # open before the mount hides what is in /tmp
        self._mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
        for path, source in sources.items():
            target, source_path = root + path, f"/proc/self/fd/{source}"
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isdir(source_path):
                os.makedirs(target, exist_ok=True)
            else:
                open(target, "w").close()
            self._mount(source_path, target, None, _BIND)
            # A user namespace may not drop the flags that the mount has outside (nosuid, nodev, noexec).
            flags = os.statvfs(target).f_flag & 0b1110
            self._mount(None, target, None, _BIND | _REMOUNT | _RDONLY | flags)
            os.close(source)
        os.makedirs(root + SCRATCH, exist_ok=True)
        os.chdir(root)
        # With "." twice the old root ends up on top of the new one, and is detached from there.
        self._syscall(_MACHINES[platform.machine()][2], b".", b".")
        self._call("umount2", b".", 2)
        os.chdir("/")
        self._mount(None, "/", None, _REMOUNT | _RDONLY | _NOSUID | _NODEV)

    # Files, seen through Landlock

    def _build_ruleset(self, readable: Sequence[str]) -> None:
        """Build a Landlock ruleset that allows reading `readable`, and no other access to any file."""
        version = self._syscall(444, None, 0, 1)  # landlock_create_ruleset
        # All rights of the kernel's version: 13 at first, then refer, truncate and ioctl on devices.
        rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
        attributes = struct.pack("=QQQ", rights, 3, 3)  # newer kernels: no TCP, no signals or sockets to the outside
        ruleset = self._syscall(444, attributes, 24 if version >= 6 else 8, 0)
        self.ruleset = fcntl.fcntl(ruleset, fcntl.F_DUPFD_CLOEXEC, 100)  # out of the way of a child's descriptors
        for path in readable:
            target = os.open(path, os.O_PATH)
            allowed = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
            self._syscall(445, self.ruleset, 1, struct.pack("=Qi", allowed, target), 0)  # landlock_add_rule
            os.close(target)

    # System calls

    def _filter_calls(self) -> None:
        """Let the kernel refuse every system call that is not in _CALLS, as if it did not exist."""
        column, arch, _ = _MACHINES[platform.machine()]
        numbers = [call for found in _CALLS.values() if (call := found[column]) is not None]
        load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06  # instructions of classic BPF
        number, machine, arguments = 0, 4, 16  # offsets in struct seccomp_data
        allow, refuse, kill = (give, 0x7FFF0000, 0, 0), (give, 0x00050000 | 38, 0, 0), (give, 0, 0, 0)  # 38: ENOSYS
        # Each entry is (instruction, value, instructions to skip if true, if false).
        program = [(load, machine, 0, 0), (equal, arch, 1, 0), kill, (load, number, 0, 0)]
        for name, (calls, place, values) in _CONDITIONS.items():
            test, values = any_bit if name == "clone" else equal, values or (os.getpid(),)
            program += [(equal, calls[column], 0, len(values) + 3), (load, arguments + 8 * place, 0, 0)]
            program += [(test, value, len(values) - index, 0) for index, value in enumerate(values)]
            program += [refuse, allow]
        program += [(equal, call, len(numbers) - index, 0) for index, call in enumerate(numbers)]
        program += [refuse, allow]
        code = b"".join(struct.pack("=HBBI", kind, true, false, value) for kind, value, true, false in program)
        buffer = ctypes.create_string_buffer(code)
        self._prctl(_SECCOMP, 2, struct.pack("@HP", len(program), ctypes.addressof(buffer)))

    # Calls that raise OSError

    def _mount(self, source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        source_b, kind_b, data_b = (None if text is None else os.fsencode(text) for text in (source, kind, data))
        self._call("mount", source_b, os.fsencode(target), kind_b, ctypes.c_ulong(flags), data_b)

    def _prctl(self, option: int, value: int, pointer: bytes | None = None) -> None:
        self._call("prctl", option, ctypes.c_ulong(value), pointer, None, None)

    def _syscall(self, number: int, *arguments: int | bytes | None) -> int:
        wide = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
        return self._call("syscall", ctypes.c_long(number), *wide)

    def _call(self, name: str, *arguments: object) -> int:
        result = getattr(self.libc, name)(*arguments)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{name}: {os.strerror(code)}")
        return result


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a limit, or keep a lower one that was set from outside."""
    _, most = resource.getrlimit(kind)
    hard = soft if hard is None else hard
    hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(kind, (min(soft, hard), hard))
