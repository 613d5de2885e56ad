/* This process: its plan, its NCCL and its log, what the user has set, and other plugins. */
#include "plugin.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <unistd.h>

enum { LOG_INFO = 3, LOG_INIT = 0x1, MAX_LIBRARY_NAME = 254 };
/* NCCL versions whose order of calls and struct ncclComm were tried; nccl/versions.py has them too. */
enum { FIRST_NCCL = 22807, LAST_NCCL = 23299, FIRST_UNCACHED = 23000 };

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static struct plan *plan;
static struct environment *next;   /* somebody else's environment plugin, behind this one */
static uint32_t version;           /* of this process's first NCCL, for which the plan was checked */
static bool mixed;                 /* another release has started since */
static logger_t logger;
static bool debug;
char *own_path, *networks, *uncached;

const struct plan *active_plan(void) { return plan; }
uint32_t nccl_version(void) { return version; }
bool has_two_releases(void) { return __atomic_load_n(&mixed, __ATOMIC_ACQUIRE); }
void set_logger(void *function) { __atomic_store_n((void **)&logger, function, __ATOMIC_RELEASE); }

const char *user_value(const char *name) { return next ? next->get(name) : getenv(name); }

/* Write a line to NCCL's log, and with TCCL_DEBUG=1 to stderr. Version 1 has no log at its start:
 * there NCCL_DEBUG=INFO shows on stderr why there is no plan. */
void say(const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  logger_t log;
  *(void **)&log = __atomic_load_n((void **)&logger, __ATOMIC_ACQUIRE);
  if (log) log(LOG_INFO, LOG_INIT, "tccl", 0, "tccl: %s", text);
  const char *level = log ? NULL : getenv("NCCL_DEBUG");
  if (debug || (level && (strcasecmp(level, "INFO") == 0 || strcasecmp(level, "TRACE") == 0)))
    dprintf(STDERR_FILENO, "tccl[%d]: %s\n", (int)getpid(), text);
}

static bool enabled(const char *name) {
  const char *value = getenv(name);
  return value && value[0] != '\0' && strcmp(value, "0") != 0;
}

/* Return the newest NCCL beyond LAST_NCCL with which a trial went well (`tccl install
 * --newer-nccl`), or 0. */
static uint32_t newest_tried(void) {
  unsigned major, minor, patch;
  char more;
  const char *value = getenv("TCCL_NEWER_NCCL");
  if (!value || sscanf(value, "%u.%u.%u%c", &major, &minor, &patch, &more) != 3) return 0;
  return major > 99 || minor > 99 || patch > 99 ? 0 : major * 10000 + minor * 100 + patch;
}

static bool has_value(const struct variable *variable, bool or_none) {
  const char *value = user_value(variable->name);
  return value ? strcasecmp(value, variable->value) == 0 : or_none;
}

/* Return the variable that contradicts the plan in this process, or NULL. NCCL reads the needed ones
 * once per process, before any rank can know what the others have: the plugin never answers them. */
const char *contradiction(const struct plan *of) {
  /* Communicators of NCCL_COMM_ID have the same hash in every job. */
  static const char *const always[] = {"NCCL_GRAPH_FILE", "NCCL_COMM_ID"};
  for (size_t i = 0; i < sizeof always / sizeof *always; i++)
    if (user_value(always[i])) return always[i];
  for (int i = 0; i < of->forbid.count; i++)
    if (user_value(of->forbid.items[i].name)) return of->forbid.items[i].name;
  for (int i = 0; i < of->need.count; i++)
    if (!has_value(&of->need.items[i], false)) return of->need.items[i].name;
  for (int i = 0; i < of->must.count; i++)
    if (!has_value(&of->must.items[i], true)) return of->must.items[i].name;
  return NULL;
}

/* List what NCCL has to read anew for each communicator, behind the user's list. NCCL_ALGO it reads
 * anew by itself. */
static bool list_uncached(const struct plan *of, char why[MAX_REASON]) {
  const char *users = user_value("NCCL_NO_CACHE");
  char *list = strdup(users ? users : "");
  for (int i = 0; list && i < of->give.count; i++) {
    const char *name = of->give.items[i].name;
    char *shorter = list;
    if (strcmp(name, "NCCL_ALGO") == 0) continue;
    if (version < FIRST_UNCACHED)
      return free(list), explain(why, "before 2.30 NCCL reads %s once per process", name);
    if (asprintf(&list, "%s%s%s", shorter, shorter[0] ? "," : "", name) < 0) list = NULL;
    free(shorter);
  }
  uncached = list;
  return list || explain(why, "no memory");
}

/* Put this library in front of the networks that NCCL would try. */
static bool list_networks(char why[MAX_REASON]) {
  Dl_info info;
  char own[PATH_MAX];
  const char *others = user_value("NCCL_NET_PLUGIN");
  if (!others) others = "libnccl-net.so";
  else if (strcasecmp(others, "none") == 0) others = "";
  if (dladdr(&plan, &info) == 0 || !realpath(info.dli_fname, own))
    return explain(why, "the plugin does not find its own file");
  if (strlen(own) > MAX_LIBRARY_NAME || strchr(own, ','))
    return explain(why, "NCCL cannot open %.120s: a comma, or too long", own);
  return ((own_path = strdup(own)) &&
          asprintf(&networks, "%s%s%s", own, others[0] ? "," : "", others) > 0) ||
         explain(why, "no memory");
}

/* Check that boards and graph files can be written: a signal ends a process that exceeds a limit. */
static bool may_write(char why[MAX_REASON]) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= MAX_INDEX_BYTES) return true;
  return explain(why, "this process may write files of %llu bytes alone",
                 (unsigned long long)limit.rlim_cur);
}

static bool fits(const struct plan *found, char why[MAX_REASON]) {
  int major = (int)(version / 10000), minor = (int)(version / 100 % 100);
  if (found->nccl_major >= 0 && (found->nccl_major != major || found->nccl_minor != minor))
    return explain(why, "the plan is for NCCL %d.%d", found->nccl_major, found->nccl_minor);
  if (version < FIRST_NCCL || (version > LAST_NCCL && version > newest_tried()))
    return explain(why, "this plugin does not know NCCL %d.%d", major, minor);
  return host_matches(found, why) && may_write(why) && list_networks(why) &&
         list_uncached(found, why);
}

/* Return this host's index of the job that TCCL_JOB names, else TCCL_INDEX; NULL: neither. */
static char *index_path(void) {
  const char *job = getenv("TCCL_JOB"), *index = getenv("TCCL_INDEX");
  const char *node = getenv("SLURMD_NODENAME");
  char own[256] = "", *path = NULL;
  if (!job) return index ? strdup(index) : NULL; /* the environment may change */
  if (gethostname(own, sizeof own - 1) != 0) own[0] = '\0';
  /* Hydra copies SLURM's name of the first host to all. */
  const char *names[] = {own, own, node ? node : own};
  for (int i = 0; i < 3; i++) {
    if (i == 1) own[strcspn(own, ".")] = '\0';
    free(path);
    if (asprintf(&path, "%s/nccl/hosts/%s.index", job, names[i]) < 0) return NULL;
    if (access(path, F_OK) == 0) break;
  }
  return path;
}

static void load(void) {
  char why[MAX_REASON] = "";
  if (enabled("TCCL_DISABLE")) {
    say("default NCCL: TCCL_DISABLE is set");
    return;
  }
  char *path = index_path();
  struct plan *found = path ? plan_load(path, why) : NULL;
  if (found && !fits(found, why)) {
    plan_free(found);
    found = NULL;
  }
  __atomic_store_n(&plan, found, __ATOMIC_RELEASE);
  if (!found) say("default NCCL: %s", path ? why : "TCCL_INDEX is not set");
  if (!found) free(path);
  else say("plan %s: %d sets of GPUs, %d tuned ranges%s", found->path, found->set_count,
           found->tune_count, found->simulated ? ", simulated" : "");
}

/* Load the environment plugin that TCCL_ENV_PLUGIN_NEXT names. */
static void load_next(const uint8_t nccl[3], const char *suffix, logger_t log, int api) {
  const char *path = getenv("TCCL_ENV_PLUGIN_NEXT");
  void *library = path && path[0] ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  struct environment *found = NULL;
  if (!path || !path[0]) return;
  if (library && api == 2) found = dlsym(library, "ncclEnvPlugin_v2");
  if (library && !found) found = dlsym(library, "ncclEnvPlugin_v1");
  if (found && dlsym(library, "tccl_plugin") == NULL &&
      found->init(nccl[0], nccl[1], nccl[2], suffix, log) == SUCCESS)
    next = found;
  else
    say("TCCL_ENV_PLUGIN_NEXT=%s: no environment plugin that starts", path);
}

/* Another release of NCCL in this process shares this library, and neither questions nor the network's
 * init say whose they are. So all later posts refuse the plan (decide.c). What was posted before is the
 * first NCCL's, and other ranks count on it: those communicators go on as if nothing had happened. */
int start_process(const uint8_t nccl[3], const char *suffix, logger_t log, int api) {
  uint32_t own = nccl[0] * 10000u + nccl[1] * 100u + nccl[2];
  if (log) set_logger((void *)log);
  pthread_mutex_lock(&starting);
  if (!version) {
    debug = enabled("TCCL_DEBUG");
    version = own;
    load_next(nccl, suffix, log, api);
    load();
  } else if (own != version) {
    __atomic_store_n(&mixed, true, __ATOMIC_RELEASE);
    say("default NCCL: this process has two releases of NCCL, %u.%u.%u and %u.%u.%u",
        version / 10000, version / 100 % 100, version % 100, nccl[0], nccl[1], nccl[2]);
  }
  pthread_mutex_unlock(&starting);
  return SUCCESS; /* a failure would fail every later call of NCCL */
}

/* End the environment plugin behind this one. */
int finish_next(void) { return next ? next->finalize() : SUCCESS; }

int nothing(void *unused) {
  (void)unused;
  return SUCCESS;
}

/* Look for any version of a symbol in a library that NCCL would open by this name. */
static bool has_symbol(const char *name, const char *stem) {
  char symbol[64];
  void *library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
  for (int version = 1; library && version <= 9; version++) {
    snprintf(symbol, sizeof symbol, "%s%d", stem, version);
    if (dlsym(library, symbol)) return true;
  }
  return false; /* the library stays open, as NCCL would keep it */
}

/* Say whether NCCL finds somebody else's plugin of a kind by itself: without an answer it tries
 * libnccl-KIND.so, then the network library that it opened last. */
bool others_have(const char *kind, const char *stem) {
  const char *names = user_value("NCCL_NET_PLUGIN");
  char *list = strdup(names ? names : "libnccl-net.so"), *save, path[512];
  snprintf(path, sizeof path, "libnccl-%s.so", kind);
  bool found = !list || has_symbol(path, stem);
  for (char *name = found ? NULL : strtok_r(list, ",", &save); name && !found;
       name = strtok_r(NULL, ",", &save)) {
    snprintf(path, sizeof path, "libnccl-net-%s.so", name);
    found = has_symbol(name, stem) || has_symbol(path, stem);
  }
  free(list);
  return found;
}

static bool others, lost;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void look_for_others(void) { others = others_have("tuner", "ncclTunerPlugin_v"); }

/* Say whether NCCL will ask this tuner in the communicators of this process. */
bool tuner_is_asked(void) {
  const struct plan *plan = active_plan();
  if (plan->tune_count == 0 || user_value("NCCL_TUNER_PLUGIN") || user_value("NCCL_CTA_POLICY"))
    return false; /* a tuner keeps the policy EFFICIENCY from choosing NVLS for registered buffers */
  pthread_once(&once, look_for_others);
  return !others && !__atomic_load_n(&lost, __ATOMIC_RELAXED);
}

/* Answer NCCL_TUNER_PLUGIN, which NCCL asks in a process's first communicator, where the user does
 * not: this library, nothing where another library has a tuner, and `none` without a table, as NCCL
 * would take this library's all the same. */
const char *tuner_plugin(const char *user, const char *own) {
  if (tuner_is_asked()) return own;
  __atomic_store_n(&lost, true, __ATOMIC_RELAXED);
  if (!user) pthread_once(&once, look_for_others);
  return user || others ? user : "none";
}
