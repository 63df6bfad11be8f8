/* Intercepts the C library calls by which a process changes files below one folder: counts them, writes them to a log,
 * and at the n-th call kills the process or makes the call fail.
 *
 * Loaded with LD_PRELOAD. It does nothing until faults_arm() is called, and then only in the process that called it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { WATCH, KILL, KILL_HALFWAY, DISK_FULL, IO_ERROR };

static char folder[PATH_MAX];
static size_t folder_length;
static pid_t armed;
static enum mode mode;
static long fault_at, seen;
static int log_file = -1;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

/* Calls are numbered from 1; the fault happens at call `at`. */
void faults_arm(const char *below, int what, long at, const char *log_path) {
    snprintf(folder, sizeof folder, "%s", below);
    folder_length = strlen(folder);
    mode = what;
    fault_at = at;
    seen = 0;
    log_file = log_path ? (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    armed = getpid();
}

long faults_seen(void) { return seen; }

static int is_below(const char *path) {
    return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return 1;
}

/* Return the absolute path of `name`, relative to the directory descriptor as in the *at() calls. */
static int resolve(int directory, const char *name, char *path) {
    char start[PATH_MAX];
    if (name[0] == '/') return snprintf(path, PATH_MAX, "%s", name) < PATH_MAX;
    if (directory == AT_FDCWD ? !getcwd(start, sizeof start) : !path_of(directory, start)) return 0;
    return snprintf(path, PATH_MAX, "%s/%s", start, name) < PATH_MAX;
}

static void put(const void *data, size_t length) {
    const char *rest = data;
    while (length) {
        ssize_t n = syscall(SYS_write, log_file, rest, length);
        if (n <= 0) abort();
        rest += n;
        length -= n;
    }
}

/* Append one record to the log: the operation (x: a call that failed), the file's path and inode, the offset, the bytes.
 * Every counted call has one record, so that the n-th record belongs to call n. */
static void record(char what, const char *path, const char *to, ino_t inode, off_t offset, const void *data, size_t length) {
    if (log_file < 0) return;
    uint64_t numbers[5] = {strlen(path), to ? strlen(to) : 0, inode, offset, data ? length : 0};
    put(&what, 1);
    put(numbers, sizeof numbers);
    put(path, numbers[0]);
    put(to, numbers[1]);
    put(data, numbers[4]);
}

static ino_t inode_of(const char *path) {
    struct stat s;
    return fstatat(AT_FDCWD, path, &s, AT_SYMLINK_NOFOLLOW) ? 0 : s.st_ino;
}

/* Count one call; return 0 to let it happen, or an error number to make it fail. May kill the process instead.
 * `grows`: whether the call needs disk space, so that it fails on a full disk. */
static int strike(int grows) {
    long number = ++seen;
    if (mode == KILL && number == fault_at) kill(getpid(), SIGKILL);
    if (mode == DISK_FULL && number >= fault_at && grows) return ENOSPC;
    if (mode == IO_ERROR && number == fault_at) return EIO;
    return 0;
}

#define FAIL_IF(error) do { int e_ = (error); if (e_) { pthread_mutex_unlock(&one_at_a_time); errno = e_; return -1; } } while (0)
#define KEEPING_ERRNO(statement) do { int kept_ = errno; statement; errno = kept_; } while (0)
#define DONE(result) do { int saved_ = errno; pthread_mutex_unlock(&one_at_a_time); errno = saved_; return (result); } while (0)

/* Writing. */

static ssize_t write_at(int fd, const void *data, size_t length, off_t offset, int has_offset) {
    char path[PATH_MAX];
    if (armed != getpid() || !path_of(fd, path) || !is_below(path))
        return has_offset ? syscall(SYS_pwrite64, fd, data, length, offset) : syscall(SYS_write, fd, data, length);
    pthread_mutex_lock(&one_at_a_time);
    struct stat s;
    fstat(fd, &s);
    if (!has_offset) offset = (fcntl(fd, F_GETFL) & O_APPEND) ? s.st_size : lseek(fd, 0, SEEK_CUR);
    long number = seen + 1;
    if (length > 1 && number == fault_at && (mode == KILL_HALFWAY || mode == DISK_FULL)) {
        seen++;
        ssize_t n = syscall(SYS_pwrite64, fd, data, length / 2, offset);
        if (mode == KILL_HALFWAY) kill(getpid(), SIGKILL);
        if (!has_offset && n > 0) lseek(fd, offset + n, SEEK_SET);
        DONE(n); /* a short count; the next call fails because the disk is full */
    }
    FAIL_IF(strike(1));
    ssize_t n = has_offset ? syscall(SYS_pwrite64, fd, data, length, offset) : syscall(SYS_write, fd, data, length);
    KEEPING_ERRNO(record(n > 0 ? 'w' : 'x', path, NULL, s.st_ino, offset, data, n > 0 ? n : 0));
    DONE(n);
}

ssize_t write(int fd, const void *data, size_t length) { return write_at(fd, data, length, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return write_at(fd, data, length, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) { return write_at(fd, data, length, offset, 1); }

ssize_t writev(int fd, const struct iovec *parts, int count) {
    ssize_t total = 0;
    char path[PATH_MAX];
    if (armed != getpid() || !path_of(fd, path) || !is_below(path)) return syscall(SYS_writev, fd, parts, count);
    for (int i = 0; i < count; i++) {
        if (!parts[i].iov_len) continue;
        ssize_t n = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (n < 0) return total ? total : n;
        total += n;
        if ((size_t)n < parts[i].iov_len) break;
    }
    return total;
}

/* The log would miss copies inside the kernel. So these calls fail, as on a file system that does not support them. */
ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t length, unsigned flags) {
    char path[PATH_MAX];
    if (armed == getpid() && path_of(out, path) && is_below(path)) { errno = EXDEV; return -1; }
    return syscall(SYS_copy_file_range, in, in_offset, out, out_offset, length, flags);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t length) {
    char path[PATH_MAX];
    if (armed == getpid() && path_of(out, path) && is_below(path)) { errno = EINVAL; return -1; }
    return syscall(SYS_sendfile, out, in, offset, length);
}
ssize_t sendfile(int out, int in, off_t *offset, size_t length) { return sendfile64(out, in, offset, length); }

static int truncate_to(int fd, off_t length) {
    char path[PATH_MAX];
    if (armed != getpid() || !path_of(fd, path) || !is_below(path)) return syscall(SYS_ftruncate, fd, length);
    pthread_mutex_lock(&one_at_a_time);
    struct stat s;
    fstat(fd, &s);
    FAIL_IF(strike(length > s.st_size));
    int result = syscall(SYS_ftruncate, fd, length);
    KEEPING_ERRNO(record(result ? 'x' : 't', path, NULL, s.st_ino, length, NULL, 0));
    DONE(result);
}

int ftruncate(int fd, off_t length) { return truncate_to(fd, length); }
int ftruncate64(int fd, off_t length) { return truncate_to(fd, length); }

static int fallocate_to(int fd, int how, off_t offset, off_t length) {
    char path[PATH_MAX];
    if (armed == getpid() && path_of(fd, path) && is_below(path)) { errno = EOPNOTSUPP; return -1; }
    return syscall(SYS_fallocate, fd, how, offset, length);
}
int fallocate(int fd, int how, off_t offset, off_t length) { return fallocate_to(fd, how, offset, length); }
int fallocate64(int fd, int how, off_t offset, off_t length) { return fallocate_to(fd, how, offset, length); }
int posix_fallocate(int fd, off_t offset, off_t length) { return fallocate_to(fd, 0, offset, length) ? errno : 0; }
int posix_fallocate64(int fd, off_t offset, off_t length) { return fallocate_to(fd, 0, offset, length) ? errno : 0; }

/* Syncing. */

static int sync_now(int call, int fd) {
    char path[PATH_MAX];
    if (armed != getpid() || !path_of(fd, path) || !is_below(path)) return syscall(call, fd);
    pthread_mutex_lock(&one_at_a_time);
    struct stat s;
    fstat(fd, &s);
    FAIL_IF(strike(0));
    record('s', path, NULL, s.st_ino, 0, NULL, 0); /* not passed on: tests need no real sync */
    DONE(0);
}

int fsync(int fd) { return sync_now(SYS_fsync, fd); }
int fdatasync(int fd) { return sync_now(SYS_fdatasync, fd); }

/* Names. */

static int open_at(int directory, const char *name, int flags, mode_t permissions) {
    char path[PATH_MAX];
    int changes = flags & (O_CREAT | O_TRUNC);
    if (!changes || armed != getpid() || !resolve(directory, name, path) || !is_below(path))
        return syscall(SYS_openat, directory, name, flags, permissions);
    pthread_mutex_lock(&one_at_a_time);
    struct stat s;
    int is_new = fstatat(AT_FDCWD, path, &s, 0) != 0;
    int empties = !is_new && (flags & O_TRUNC) && s.st_size;
    if (is_new || empties) FAIL_IF(strike(is_new));
    int fd = syscall(SYS_openat, directory, name, flags, permissions);
    if (is_new) KEEPING_ERRNO(record(fd < 0 ? 'x' : 'c', path, NULL, inode_of(path), 0, NULL, 0));
    if (empties) KEEPING_ERRNO(record(fd < 0 ? 'x' : 't', path, NULL, s.st_ino, 0, NULL, 0));
    DONE(fd);
}

#define PERMISSIONS(flags) mode_t permissions = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list l; va_start(l, flags); permissions = va_arg(l, mode_t); va_end(l); }
int open(const char *name, int flags, ...) { PERMISSIONS(flags) return open_at(AT_FDCWD, name, flags, permissions); }
int open64(const char *name, int flags, ...) { PERMISSIONS(flags) return open_at(AT_FDCWD, name, flags, permissions); }
int openat(int d, const char *name, int flags, ...) { PERMISSIONS(flags) return open_at(d, name, flags, permissions); }
int openat64(int d, const char *name, int flags, ...) { PERMISSIONS(flags) return open_at(d, name, flags, permissions); }
int __open_2(const char *name, int flags) { return open_at(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return open_at(AT_FDCWD, name, flags, 0); }
int creat(const char *name, mode_t permissions) { return open_at(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, permissions); }

static int rename_at(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    if (armed != getpid() || !resolve(from_dir, from, a) || !resolve(to_dir, to, b) || !(is_below(a) || is_below(b)))
        return syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
    pthread_mutex_lock(&one_at_a_time);
    FAIL_IF(strike(0));
    int result = syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
    KEEPING_ERRNO(record(result ? 'x' : 'r', a, b, 0, 0, NULL, 0));
    DONE(result);
}
int rename(const char *from, const char *to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int d, const char *from, int e, const char *to) { return rename_at(d, from, e, to, 0); }
int renameat2(int d, const char *from, int e, const char *to, unsigned f) { return rename_at(d, from, e, to, f); }

static int unlink_at(int directory, const char *name, int flags) {
    char path[PATH_MAX];
    if (armed != getpid() || !resolve(directory, name, path) || !is_below(path) || !inode_of(path))
        return syscall(SYS_unlinkat, directory, name, flags);
    pthread_mutex_lock(&one_at_a_time);
    FAIL_IF(strike(0));
    int result = syscall(SYS_unlinkat, directory, name, flags);
    KEEPING_ERRNO(record(result ? 'x' : 'u', path, NULL, 0, 0, NULL, 0));
    DONE(result);
}
int unlink(const char *name) { return unlink_at(AT_FDCWD, name, 0); }
int unlinkat(int directory, const char *name, int flags) { return unlink_at(directory, name, flags); }
int rmdir(const char *name) { return unlink_at(AT_FDCWD, name, AT_REMOVEDIR); }

static int mkdir_at(int directory, const char *name, mode_t permissions) {
    char path[PATH_MAX];
    if (armed != getpid() || !resolve(directory, name, path) || !is_below(path) || inode_of(path))
        return syscall(SYS_mkdirat, directory, name, permissions);
    pthread_mutex_lock(&one_at_a_time);
    FAIL_IF(strike(1));
    int result = syscall(SYS_mkdirat, directory, name, permissions);
    KEEPING_ERRNO(record(result ? 'x' : 'm', path, NULL, inode_of(path), 0, NULL, 0));
    DONE(result);
}
int mkdir(const char *name, mode_t permissions) { return mkdir_at(AT_FDCWD, name, permissions); }
int mkdirat(int directory, const char *name, mode_t permissions) { return mkdir_at(directory, name, permissions); }
