/* Records every change to the files below one directory, in one order for all processes and threads that preload this library.
 *
 * The log is shared memory: a robust mutex orders the changes, and a record counts once `used` has moved past it. A change and
 * its record are made under the mutex, so the order of the records is the order of the changes. Syncs are recorded and not
 * carried out: what a sync keeps is decided when the files are rebuilt. Changes through mmap are not seen; SQLite uses that
 * for `-shm` files alone, and makes those anew after a crash, so they are left out.
 *
 * A file is known by its inode (an open file may be renamed, its descriptor duplicated or inherited); names are only in the
 * records of directory entries, relative to the recorded directory.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NAME 4096

struct shared {
  uint64_t capacity, used, full;
  char root[NAME];
  pthread_mutex_t lock;
};

struct record { /* then `first` and `second` bytes */
  uint32_t size;
  uint32_t op;
  uint64_t inode, at;
  uint32_t first, second;
};

static struct shared *shared;
static char *records;
static size_t root_length;

static const size_t HEADER = 16384; /* the records begin here */

/* Called by the test before any process starts: makes the log. */
int powercut_prepare(const char *path, uint64_t capacity, const char *root) {
  int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, HEADER + capacity) || strlen(root) >= NAME) return -1;
  struct shared *made = mmap(NULL, HEADER, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (made == MAP_FAILED) return -1;
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&made->lock, &kind);
  made->capacity = capacity;
  strcpy(made->root, root);
  munmap(made, HEADER);
  return 0;
}

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("POWERCUT_LOG");
  if (!path) return;
  int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
  struct stat found;
  if (fd < 0 || fstat(fd, &found)) return;
  char *mapped = mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) return;
  records = mapped + HEADER;
  root_length = strlen(((struct shared *)mapped)->root);
  shared = (struct shared *)mapped;
}

static void lock(void) {
  if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}

static void unlock(void) {
  int kept = errno;
  pthread_mutex_unlock(&shared->lock);
  errno = kept;
}

static void add(char op, uint64_t inode, uint64_t at, const void *first, size_t n, const void *second, size_t m) {
  size_t size = (sizeof(struct record) + n + m + 7) & ~(size_t)7;
  if (shared->used + size > shared->capacity) {
    shared->full = 1; /* the test fails: a log with a hole proves nothing */
    return;
  }
  struct record head = {size, op, inode, at, n, m};
  char *to = records + shared->used;
  memcpy(to, &head, sizeof head);
  memcpy(to + sizeof head, first, n);
  if (m) memcpy(to + sizeof head + n, second, m);
  __atomic_store_n(&shared->used, shared->used + size, __ATOMIC_RELEASE);
}

/* ---- which files are ours */

/* The part of an absolute path below the recorded directory; NULL when it is elsewhere, or a -shm file. */
static const char *below(const char *path) {
  if (strncmp(path, shared->root, root_length)) return NULL;
  const char *rest = path + root_length;
  if (*rest && *rest != '/') return NULL;
  size_t length = strlen(rest);
  if (length >= 4 && !strcmp(rest + length - 4, "-shm")) return NULL;
  return *rest ? rest + 1 : rest;
}

static int ours(int fd, struct stat *found) {
  if (!shared) return 0;
  int kept = errno, yes = 0;
  char link[64], path[NAME];
  if (!fstat(fd, found) && (S_ISREG(found->st_mode) || S_ISDIR(found->st_mode))) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    yes = below(path) != NULL;
  }
  errno = kept;
  return yes;
}

/* Makes `path` absolute and plain in `full`; then as `below`. Symlinks are not followed: the recorded directory has none. */
static const char *named(int folder, const char *path, char *full) {
  if (!shared || !path) return NULL;
  int kept = errno;
  char raw[2 * NAME], link[64];
  size_t n = 0;
  if (*path != '/') {
    if (folder == AT_FDCWD) {
      if (syscall(SYS_getcwd, raw, NAME) < 0) return NULL;
      n = strlen(raw);
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
      ssize_t found = syscall(SYS_readlinkat, AT_FDCWD, link, raw, NAME - 1);
      n = found > 0 ? found : 0;
    }
    raw[n++] = '/';
  }
  errno = kept;
  if (strlen(path) >= NAME) return NULL;
  strcpy(raw + n, path);
  size_t out = 0;
  for (char *rest = raw, *part; (part = strtok_r(rest, "/", &rest));) {
    if (!strcmp(part, ".")) continue;
    if (!strcmp(part, "..")) {
      while (out && full[--out] != '/') {}
      continue;
    }
    size_t length = strlen(part);
    if (out + length + 2 > NAME) return NULL;
    full[out++] = '/';
    memcpy(full + out, part, length);
    out += length;
  }
  full[out] = 0;
  return below(full);
}

static uint64_t inode_at(int folder, const char *path) {
  struct stat found;
  return fstatat(folder, path, &found, AT_SYMLINK_NOFOLLOW) ? 0 : found.st_ino;
}

/* ---- opening */

static int opened(int folder, const char *path, int flags, mode_t mode) {
  char full[NAME];
  const char *name = flags & (O_CREAT | O_TRUNC) ? named(folder, path, full) : NULL;
  if (!name) return syscall(SYS_openat, folder, path, flags, mode);
  lock();
  struct stat found = {0};
  int before = errno, existed = !fstatat(folder, path, &found, 0);
  errno = before;
  int fd = syscall(SYS_openat, folder, path, flags, mode);
  if (fd >= 0 && !existed && !fstat(fd, &found)) add('C', found.st_ino, 0, name, strlen(name), NULL, 0);
  else if (fd >= 0 && flags & O_TRUNC && found.st_size) add('T', found.st_ino, 0, NULL, 0, NULL, 0);
  unlock();
  return fd;
}

#define MODE(flags, mode)                        \
  mode_t mode = 0;                               \
  if ((flags) & (O_CREAT | O_TMPFILE)) {         \
    va_list more;                                \
    va_start(more, flags);                       \
    mode = va_arg(more, mode_t);                 \
    va_end(more);                                \
  }

int open(const char *path, int flags, ...) { MODE(flags, mode) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, mode) return opened(AT_FDCWD, path, flags, mode); }
int openat(int d, const char *path, int flags, ...) { MODE(flags, mode) return opened(d, path, flags, mode); }
int openat64(int d, const char *path, int flags, ...) { MODE(flags, mode) return opened(d, path, flags, mode); }
int __open_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __openat_2(int d, const char *path, int flags) { return opened(d, path, flags, 0); }
int __openat64_2(int d, const char *path, int flags) { return opened(d, path, flags, 0); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* ---- writing */

static void wrote(const struct stat *found, uint64_t at, const struct iovec *parts, int count, ssize_t n) {
  for (int i = 0; i < count && n > 0; i++) {
    size_t part = parts[i].iov_len < (size_t)n ? parts[i].iov_len : (size_t)n;
    if (part) add('W', found->st_ino, at, parts[i].iov_base, part, NULL, 0);
    at += part;
    n -= part;
  }
}

/* `at` below 0: at the file's own position, or at its end where it was opened to append. */
static ssize_t put(int fd, const struct iovec *parts, int count, off_t at) {
  struct stat found;
  if (!ours(fd, &found))
    return at < 0 ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, at, 0);
  lock();
  fstat(fd, &found);
  int append = fcntl(fd, F_GETFL) & O_APPEND;
  off_t from = append ? found.st_size : at < 0 ? lseek(fd, 0, SEEK_CUR) : at;
  ssize_t n = at < 0 ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, at, 0);
  wrote(&found, from, parts, count, n);
  unlock();
  return n;
}

ssize_t write(int fd, const void *data, size_t size) {
  struct iovec part = {(void *)data, size};
  struct stat found;
  return ours(fd, &found) ? put(fd, &part, 1, -1) : syscall(SYS_write, fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  struct iovec part = {(void *)data, size};
  return put(fd, &part, 1, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return pwrite(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return put(fd, parts, count, -1); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return put(fd, parts, count, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) { return put(fd, parts, count, at); }

/* Copies inside the kernel show no bytes: refuse, and callers fall back to writes. */
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
  struct stat found;
  if (!ours(to, &found)) return syscall(SYS_sendfile, to, from, at, size);
  errno = EINVAL;
  return -1;
}
ssize_t sendfile64(int to, int from, off_t *at, size_t size) { return sendfile(to, from, at, size); }
ssize_t copy_file_range(int from, off_t *a, int to, off_t *b, size_t size, unsigned flags) {
  struct stat found;
  if (!ours(to, &found)) return syscall(SYS_copy_file_range, from, a, to, b, size, flags);
  errno = EINVAL;
  return -1;
}

/* ---- sizes */

int ftruncate(int fd, off_t size) {
  struct stat found;
  if (!ours(fd, &found)) return syscall(SYS_ftruncate, fd, size);
  lock();
  int failed = syscall(SYS_ftruncate, fd, size);
  if (!failed) add('T', found.st_ino, size, NULL, 0, NULL, 0);
  unlock();
  return failed;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int truncate(const char *path, off_t size) {
  int fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0);
  if (fd < 0) return -1;
  int failed = ftruncate(fd, size), kept = errno;
  close(fd);
  errno = kept;
  return failed;
}
int truncate64(const char *path, off_t size) { return truncate(path, size); }
int fallocate(int fd, int mode, off_t at, off_t size) {
  struct stat found;
  if (!ours(fd, &found)) return syscall(SYS_fallocate, fd, mode, at, size);
  if (mode) { /* punched holes and the like are not recorded: refuse */
    errno = EOPNOTSUPP;
    return -1;
  }
  lock();
  fstat(fd, &found);
  int failed = syscall(SYS_fallocate, fd, mode, at, size);
  if (!failed && at + size > found.st_size) add('T', found.st_ino, at + size, NULL, 0, NULL, 0);
  unlock();
  return failed;
}
int fallocate64(int fd, int mode, off_t at, off_t size) { return fallocate(fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) { return fallocate(fd, 0, at, size) ? errno : 0; }
int posix_fallocate64(int fd, off_t at, off_t size) { return posix_fallocate(fd, at, size); }

/* ---- syncs */

static int synced(int fd) {
  struct stat found;
  lock();
  if (ours(fd, &found)) add('F', found.st_ino, 0, NULL, 0, NULL, 0);
  unlock();
  return 0;
}
int fsync(int fd) {
  struct stat found;
  return ours(fd, &found) ? synced(fd) : syscall(SYS_fsync, fd);
}
int fdatasync(int fd) {
  struct stat found;
  return ours(fd, &found) ? synced(fd) : syscall(SYS_fdatasync, fd);
}

/* ---- directory entries */

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  char full_from[NAME], full_to[NAME];
  const char *name_from = named(a, from, full_from), *name_to = named(b, to, full_to);
  if (!name_from || !name_to) { /* a file that comes in from elsewhere has a past that is not recorded: refuse */
    if (!name_from && !name_to) return syscall(SYS_renameat2, a, from, b, to, flags);
    errno = EXDEV;
    return -1;
  }
  lock();
  uint64_t inode = inode_at(a, from);
  int failed = syscall(SYS_renameat2, a, from, b, to, flags);
  if (!failed) add('R', inode, 0, name_from, strlen(name_from), name_to, strlen(name_to));
  unlock();
  return failed;
}
int renameat(int a, const char *from, int b, const char *to) { return renameat2(a, from, b, to, 0); }
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int a, const char *from, int b, const char *to, int flags) {
  char full[NAME];
  const char *name = named(b, to, full);
  if (!name) return syscall(SYS_linkat, a, from, b, to, flags);
  lock();
  int failed = syscall(SYS_linkat, a, from, b, to, flags);
  if (!failed) add('L', inode_at(b, to), 0, name, strlen(name), NULL, 0);
  unlock();
  return failed;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int folder, const char *path, int flags) {
  char full[NAME];
  const char *name = named(folder, path, full);
  if (!name) return syscall(SYS_unlinkat, folder, path, flags);
  lock();
  uint64_t inode = inode_at(folder, path);
  int failed = syscall(SYS_unlinkat, folder, path, flags);
  if (!failed) add('U', inode, 0, name, strlen(name), NULL, 0);
  unlock();
  return failed;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
  char full[NAME];
  const char *name = named(folder, path, full);
  if (!name) return syscall(SYS_mkdirat, folder, path, mode);
  lock();
  int failed = syscall(SYS_mkdirat, folder, path, mode);
  if (!failed) add('D', inode_at(folder, path), 0, name, strlen(name), NULL, 0);
  unlock();
  return failed;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
