/* A board: one post for each rank of a communicator, in a file of /dev/shm named by its hash.
 *
 * The first rank makes the file with its post in it, so no empty board is ever left. Every rank
 * appends one post before NCCL's barrier, and a mark when it decides; it holds the file open, with a
 * shared lock, until it has decided. Nobody waits for a lock: an exclusive one is only tried, and granted only where no
 * living process has a rank on the board. The kernel releases the locks of killed processes.
 */
#include "plugin.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Tries to get hold of a folder or board that other ranks remove at the same time. */
enum { TRIES = 100, SWEPT_AT_ONCE = 256, NAME_BYTES = 17 };

static void folder_name(char name[40]) { snprintf(name, 40, "/dev/shm/tccl-%u", geteuid()); }

static void board_name(uint64_t hash, char name[NAME_BYTES]) {
  snprintf(name, NAME_BYTES, "%016llx", (unsigned long long)hash);
}

static int close_failed(int fd) {
  int error = errno;
  close(fd);
  errno = error;
  return -1;
}

/* Open this user's folder, with mode 0700 again where a umask took that; fails with EPERM or ENOTDIR
 * where another user has made something of this name. */
static int open_folder(bool make) {
  char name[40], path[32];
  struct stat st;
  folder_name(name);
  if (make && mkdir(name, 0700) != 0 && errno != EEXIST) return -1;
  int fd = open(name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), folder = -1;
  if (fd < 0) return -1;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  if (stat_of(fd, &st) != 0 || st.st_uid != geteuid()) errno = EPERM;
  else if ((st.st_mode & 0777) == 0700 || chmod(path, 0700) == 0)
    folder = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  close_failed(fd);
  return folder;
}

static bool append(int fd, const struct post *post) {
  ssize_t written = write(fd, post, sizeof *post);
  if (written >= 0 && written != sizeof *post) errno = ENOSPC;
  return written == sizeof *post;
}

/* Remove a board that no living process holds; `fd` is open and keeps any lock it gets. */
static bool remove_stale(int folder, const char *name, int fd) {
  struct stat st;
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) return false;
  if (stat_of(fd, &st) == 0 && st.st_nlink > 0) unlinkat(folder, name, 0);
  return true;
}

/* Make a board that has a post from its first moment on; fails with EEXIST if there is one. */
static int make_board(int folder, const char *name, const struct post *post) {
  char path[32];
  int fd = openat(folder, ".", O_TMPFILE | O_RDWR | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return -1;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  /* The umask holds for this file too. */
  if (fchmod(fd, 0600) == 0 && flock(fd, LOCK_SH | LOCK_NB) == 0 && append(fd, post) &&
      linkat(AT_FDCWD, path, folder, name, AT_SYMLINK_FOLLOW) == 0)
    return fd;
  return close_failed(fd);
}

/* Open a board that others made and add a post; fails with EAGAIN if it just went away. */
static int join_board(int folder, const char *name, const struct post *post) {
  struct stat st;
  int fd = openat(folder, name, O_RDWR | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return -1;
  if (stat_of(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_uid != geteuid()) errno = EPERM;
  /* All its ranks are dead: the posts are of another communicator with this hash. */
  else if (remove_stale(folder, name, fd)) errno = EAGAIN;
  /* Under the shared lock nobody removes the board any more. */
  else if (flock(fd, LOCK_SH | LOCK_NB) != 0 || stat_of(fd, &st) != 0 || st.st_nlink == 0)
    errno = EAGAIN;
  else if (append(fd, post)) return fd;
  return close_failed(fd);
}

/* Post; return the open board, or -1 and why. A rank without a post means default NCCL for all. */
int board_post(const struct post *post, char why[MAX_REASON]) {
  char name[NAME_BYTES];
  board_name(post->hash, name);
  for (int i = 0; i < TRIES; i++) {
    int folder = open_folder(true), fd = -1;
    if (folder >= 0) {
      fd = make_board(folder, name, post);
      if (fd < 0 && errno == EEXIST) fd = join_board(folder, name, post);
    }
    int error = errno;
    if (folder >= 0) close(folder);
    if (fd >= 0) return fd;
    if (error != ENOENT && error != EAGAIN) {
      bool foreign = error == EPERM || error == ENOTDIR;
      explain(why, "cannot post in /dev/shm/tccl-%u: %s", geteuid(),
              foreign ? "another user made it, who or root can remove it" : strerror(error));
      return -1;
    }
    sched_yield();
  }
  explain(why, "cannot post: the board goes away again and again");
  return -1;
}

static void remove_folder(void) {
  char name[40];
  folder_name(name);
  rmdir(name); /* fails while there are boards */
}

/* Mark that a rank decides now: later posts count no more. Where /dev/shm is full, NCCL's barrier has
 * to do. */
void board_mark(int fd) {
  struct post mark = {.magic = "tcclread"};
  if (!append(fd, &mark)) say("cannot mark a board: %s", strerror(errno));
}

bool board_is_mark(const struct post *post) {
  return memcmp(post->magic, "tcclread", sizeof post->magic) == 0;
}

/* Leave a board. After the decision, which every rank makes from its open file, its name goes at
 * once; else the board goes with the last who leaves. */
void board_leave(int fd, uint64_t hash, bool decided) {
  char name[NAME_BYTES];
  struct stat st;
  board_name(hash, name);
  int folder = open_folder(false);
  if (folder >= 0) {
    if (!decided) remove_stale(folder, name, fd);
    else if (stat_of(fd, &st) == 0 && st.st_nlink > 0) unlinkat(folder, name, 0);
    close(folder);
    remove_folder();
  }
  close(fd);
}

/* Remove boards of killed processes. */
void boards_sweep(void) {
  int fd = open_folder(false);
  DIR *folder = fd < 0 ? NULL : fdopendir(fd);
  if (!folder) {
    if (fd >= 0) close(fd);
    return;
  }
  struct dirent *entry;
  for (int i = 0; i < SWEPT_AT_ONCE && (entry = readdir(folder)); i++) {
    if (strspn(entry->d_name, "0123456789abcdef") != NAME_BYTES - 1 ||
        entry->d_name[NAME_BYTES - 1] != '\0')
      continue;
    int board =
        openat(fd, entry->d_name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (board < 0) continue;
    remove_stale(fd, entry->d_name, board);
    close(board);
  }
  closedir(folder);
  remove_folder();
}

void board_seal(struct post *post) {
  memcpy(post->magic, "tcclpost", sizeof post->magic);
  post->check = hash_of(post, offsetof(struct post, check));
}
