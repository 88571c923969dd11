"""A disk that loses what was not synced: what a process writes is recorded, and every moment of it can be a power cut.

The process runs with a library in front of libc that notes each write, sync, cut, rename and removal in one folder.
Afterwards the folder is made again as it may be found when the power went after so many of these: names as they were
when the folder was last synced, with some of the later ones; files as they were when they were last synced, with any of
the sectors that were written since.
"""

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

ROOT = Path(__file__).parents[2]
SECTOR = 512
ACKS = "acknowledged"  # the file into which the process writes what others have heard of
_HEAD = struct.Struct("<BIQQ")  # kind, length of the path, place, length of the content
_RECORDER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static const char *folder(void) { return getenv("RECORDED_FOLDER"); }
static int wanted(const char *path) {
    size_t n = strlen(folder()), m = strlen(path);
    return !strncmp(path, folder(), n) && (path[n] == '/' || !path[n]) && !(m > 4 && !strcmp(path + m - 4, "-shm"));
}
static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, 4095);
    if (n < 0) return 0;
    path[n] = 0;
    return wanted(path);
}
static void put(int fd, const void *what, size_t n) {
    for (const char *at = what; n; ) {
        long done = syscall(SYS_write, fd, at, n);
        if (done < 0) _exit(97);
        at += done, n -= done;
    }
}
static void note(uint8_t kind, const char *path, uint64_t at, const void *what, uint64_t n) {
    static int fd = -1;
    int kept = errno;
    uint32_t m = strlen(path);
    pthread_mutex_lock(&one);
    int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC;
    if (fd < 0) fd = syscall(SYS_openat, AT_FDCWD, getenv("RECORDED_TO"), flags, 0600);
    put(fd, &kind, 1), put(fd, &m, 4), put(fd, &at, 8), put(fd, &n, 8), put(fd, path, m), put(fd, what, n);
    pthread_mutex_unlock(&one);
    errno = kept;
}
#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)
static void opened(const char *path, int flags, int was, int fd) {
    if (fd < 0 || !wanted(path)) return;
    if ((flags & O_CREAT) && !was) note('c', path, 0, "", 0);
    else if (flags & O_TRUNC) note('t', path, 0, "", 0);
}
#define OPEN(name) \
int name(const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; va_end(more); \
    REAL(int, #name, const char *, int, ...); \
    int was = !access(path, F_OK), fd = real(path, flags, mode); \
    opened(path, flags, was, fd); \
    return fd; \
}
OPEN(open) OPEN(open64)
#define OPENAT(name) \
int name(int at, const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; va_end(more); \
    REAL(int, #name, int, const char *, int, ...); \
    int was = !faccessat(at, path, F_OK, 0), fd = real(at, path, flags, mode); \
    opened(path, flags, was, fd); \
    return fd; \
}
OPENAT(openat) OPENAT(openat64)
#define PWRITE(name) \
ssize_t name(int fd, const void *what, size_t n, off_t at) { \
    REAL(ssize_t, #name, int, const void *, size_t, off_t); \
    ssize_t done = real(fd, what, n, at); \
    char path[4096]; \
    if (done > 0 && path_of(fd, path)) note('w', path, at, what, done); \
    return done; \
}
PWRITE(pwrite) PWRITE(pwrite64)
ssize_t write(int fd, const void *what, size_t n) {
    REAL(ssize_t, "write", int, const void *, size_t);
    ssize_t done = real(fd, what, n);
    char path[4096];
    if (done > 0 && path_of(fd, path)) note('w', path, lseek(fd, 0, SEEK_CUR) - done, what, done);
    return done;
}
#define SYNC(name) \
int name(int fd) { \
    REAL(int, #name, int); \
    int done = real(fd); \
    char path[4096]; \
    if (!done && path_of(fd, path)) note('s', path, 0, "", 0); \
    return done; \
}
SYNC(fsync) SYNC(fdatasync)
#define CUT(name) \
int name(int fd, off_t size) { \
    REAL(int, #name, int, off_t); \
    int done = real(fd, size); \
    char path[4096]; \
    if (!done && path_of(fd, path)) note('t', path, size, "", 0); \
    return done; \
}
CUT(ftruncate) CUT(ftruncate64)
int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    int done = real(path);
    if (!done && wanted(path)) note('u', path, 0, "", 0);
    return done;
}
int rename(const char *path, const char *to) {
    REAL(int, "rename", const char *, const char *);
    int done = real(path, to);
    if (!done && wanted(path)) note('r', path, 0, to, strlen(to));
    return done;
}
"""


class Op(NamedTuple):
    """One thing that the process did to a file: created, written, synced, cut, unlinked or renamed."""

    kind: str  # c, w, s, t, u, r
    path: str
    at: int
    content: bytes


def build_recorder(folder: Path) -> Path | None:
    """Compile the library; None if there is no compiler here."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, made = folder / "recorder.c", folder / "recorder.so"
    source.write_text(_RECORDER)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl", "-lpthread"], check=True, timeout=120
    )
    return made


def record(recorder: Path, folder: Path, script: str, *words: str) -> list[Op]:
    """Run a Python script on a folder; return what it did to the folder's files."""
    log = folder.with_name(f"{folder.name}.recorded")
    env = {**os.environ, "LD_PRELOAD": str(recorder), "RECORDED_FOLDER": str(folder), "RECORDED_TO": str(log)}
    command = [sys.executable, "-c", script, str(folder), *words]
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=300)
    return list(_read_ops(log.read_bytes())) if log.exists() else []


def _read_ops(log: bytes) -> Iterator[Op]:
    place = 0
    while place < len(log):
        kind, path_bytes, at, size = _HEAD.unpack_from(log, place)
        place += _HEAD.size
        path = log[place : place + path_bytes].decode()
        place += path_bytes
        yield Op(chr(kind), path, at, log[place : place + size])
        place += size


class File(msgspec.Struct):
    """A file's content when it was last synced, and what was done to it since."""

    synced: bytes = b""
    since: list[Op] = []

    def left(self, rng: Random, share: float) -> bytes:
        """Return the content after a power cut, with so large a share of what was not synced."""
        content = bytearray(self.synced)
        for op in self.since:
            if op.kind == "t":
                if rng.random() < share:
                    content = content[: op.at].ljust(op.at, b"\0")
                continue
            start = 0
            while start < len(op.content):
                end = start + SECTOR - (op.at + start) % SECTOR
                part = op.content[start:end]
                if rng.random() < share:
                    content = content.ljust(op.at + start, b"\0")
                    content[op.at + start : op.at + start + len(part)] = part
                start = end
        return bytes(content)


class LosingDisk:
    """One folder on such a disk."""

    def __init__(self, folder: Path) -> None:
        """The folder as it is before the process runs; all of it is synced."""
        self._folder = str(folder)
        files = [path for path in folder.iterdir() if path.is_file() and not path.name.endswith("-shm")]
        self._names = {str(path): File(path.read_bytes(), []) for path in files}
        self._synced_names = dict(self._names)
        self._since: list[Op] = []  # names that were made, changed or removed since
        self._made: dict[int, File] = {}  # by the place in this list
        self.heard: list[str] = []  # what was acknowledged

    def do(self, op: Op) -> None:
        if op.path == f"{self._folder}/{ACKS}":
            self.heard += op.content.decode().split()
            return
        match op.kind:
            case "c":
                self._names[op.path] = self._made[len(self._since)] = File(b"", [])
                self._since.append(op)
            case "u":
                self._names.pop(op.path, None)
                self._since.append(op)
            case "r":
                self._names[op.content.decode()] = self._names.pop(op.path)
                self._since.append(op)
            case "s" if op.path == self._folder:
                self._synced_names, self._since, self._made = dict(self._names), [], {}
            case "s" if op.path in self._names:
                file = self._names[op.path]
                file.synced, file.since = file.left(Random(0), 1.1), []
            case "w" | "t" if op.path in self._names:
                self._names[op.path].since.append(op)

    def left(self, rng: Random, share: float) -> dict[str, bytes]:
        """Return the folder's files after a power cut now, by name. Names are kept in the order of their changes."""
        names = dict(self._synced_names)
        kept = round(share * len(self._since)) if share in (0.0, 1.0) else rng.randint(0, len(self._since))
        for place, op in enumerate(self._since[:kept]):
            match op.kind:
                case "c":
                    names[op.path] = self._made[place]
                case "u":
                    names.pop(op.path, None)
                case "r" if op.path in names:
                    names[op.content.decode()] = names.pop(op.path)
        return {Path(path).name: file.left(rng, share) for path, file in names.items()}


def put(files: dict[str, bytes], folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
