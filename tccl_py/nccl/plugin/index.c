/* The index of a plan: read whole, checked whole. index.py writes it and documents its grammar. */
#include "plugin.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_FIELDS = 8 };
static const int64_t MAX_BYTES = INT64_C(1) << 50;

struct reader {
  char *at; /* start of the next line */
  int line;
  int count; /* fields of this line */
  char *fields[MAX_FIELDS];
};

/* Split the next line into fields, which a single space separates. */
static bool next_line(struct reader *reader) {
  char *end = strchr(reader->at, '\n');
  reader->line++;
  reader->count = 0;
  if (!end) return false;
  *end = '\0';
  for (char *field = reader->at; field;) {
    if (reader->count == MAX_FIELDS || *field == '\0' || *field == ' ') return false;
    reader->fields[reader->count++] = field;
    field = strchr(field, ' ');
    if (field) *field++ = '\0';
  }
  for (const char *c = reader->at; c < end; c++)
    if (*c != '\0' && (*c <= ' ' || *c > '~')) return false;
  reader->at = end + 1;
  return true;
}

/* Read a decimal number without sign or leading zeros, up to `end`. */
static const char *number(const char *text, int64_t limit, int64_t *out) {
  if (!isdigit((unsigned char)*text) || (text[0] == '0' && isdigit((unsigned char)text[1])))
    return NULL;
  for (*out = 0; isdigit((unsigned char)*text); text++)
    if ((*out = *out * 10 + (*text - '0')) > limit) return NULL;
  return text;
}

static bool whole_number(const char *text, int limit, int *out) {
  int64_t found = -1;
  const char *end = strcmp(text, "-") == 0 ? text + 1 : number(text, limit, &found);
  *out = (int)found;
  return end && *end == '\0';
}

bool parse_bus(const char *text, uint64_t *bus) {
  unsigned part[4];
  char rest;
  if (strlen(text) > 16 || strspn(text, "0123456789abcdefABCDEF:.") != strlen(text) ||
      sscanf(text, "%8x:%2x:%2x.%1x%c", &part[0], &part[1], &part[2], &part[3], &rest) != 4)
    return false;
  *bus = (uint64_t)part[0] << 24 | part[1] << 16 | part[2] << 8 | part[3];
  return true;
}

static bool parse_gpu(struct plan *plan, char **fields) {
  if (plan->gpu_count == MAX_GPUS) return false;
  struct gpu *gpu = &plan->gpus[plan->gpu_count];
  if (!whole_number(fields[1], MAX_NVML_INDEX, &gpu->nvml) || gpu->nvml < 0) return false;
  if (!parse_bus(fields[2], &gpu->bus)) return false;
  gpu->uuid = fields[3];
  for (int i = 0; i < plan->gpu_count; i++)
    if (plan->gpus[i].nvml >= gpu->nvml || plan->gpus[i].bus == gpu->bus) return false;
  plan->gpu_count++;
  return true;
}

/* Add a variable. Those that decide how the plugin works cannot be set by a plan. */
static bool parse_variable(struct variables *to, const char *name, const char *value, bool set) {
  static const char *const own[] = {"NCCL_GRAPH_FILE", "NCCL_ENV_PLUGIN",     "NCCL_NET_PLUGIN",
                                    "NCCL_NET",        "NCCL_TOPO_DUMP_FILE", "NCCL_COMM_ID",
                                    "NCCL_HOSTID",     "NCCL_CONF_FILE",      "NCCL_TUNER_PLUGIN"};
  for (size_t i = 0; set && i < sizeof own / sizeof *own; i++)
    if (strcmp(name, own[i]) == 0) return false;
  if (to->count == MAX_VARIABLES) return false;
  to->items[to->count++] = (struct variable){name, value};
  return true;
}

/* Return the number of the index's GPU with an NVML index, or -1. */
static int gpu_number(const struct plan *plan, int64_t nvml) {
  for (int i = 0; i < plan->gpu_count; i++)
    if (plan->gpus[i].nvml == nvml) return i;
  return -1;
}

/* Read `0,2,5`: ascending NVML indices of the plan's GPUs. */
static bool parse_gpus(const struct plan *plan, const char *text, uint64_t *gpus) {
  int64_t last = -1, nvml;
  *gpus = 0;
  for (;; text++) {
    text = number(text, MAX_NVML_INDEX, &nvml);
    int found = text && nvml > last ? gpu_number(plan, nvml) : -1;
    if (found < 0) return false;
    *gpus |= UINT64_C(1) << found;
    last = nvml;
    if (*text != ',') return *text == '\0' && (plan->job || (*gpus & (*gpus - 1)));
  }
}

/* Find the next GPU in a graph file: return the end of its number, and its place in the index (-1:
 * it is none of the plan's) and where the number begins; NULL behind the last one. */
const char *next_gpu(const struct plan *plan, const char *text, const char **begin, int *gpu) {
  static const char tag[] = "<gpu dev=\"0x";
  char *end;
  if (!(text = strstr(text, tag))) return NULL;
  *begin = text + sizeof tag - 1;
  *gpu = isxdigit((unsigned char)**begin) ? gpu_number(plan, strtol(*begin, &end, 16)) : -1;
  return *gpu < 0 ? *begin : end;
}

/* Check that a graph file names all GPUs of its set and no other GPU. */
static bool names_its_gpus(const struct plan *plan, const struct set *set) {
  uint64_t named = 0;
  const char *at = set->text, *begin;
  for (int gpu; (at = next_gpu(plan, at, &begin, &gpu)); named |= UINT64_C(1) << gpu)
    if (gpu < 0 || !(set->gpus >> gpu & 1) || *at != '"') return false;
  return named == set->gpus && strlen(set->text) == set->size;
}

/* Read a set's graph file, now: what NCCL gets later does not depend on files any more. */
static bool read_graph(struct plan *plan, struct set *set, const char *hex, char *why) {
  uint8_t found[DIGEST_BYTES];
  if (strcmp(set->name, "-") == 0) return strcmp(hex, "-") == 0 && plan->give.count > 0;
  if (set->name[0] == '/') return false;
  set->text = read_trusted(plan->folder, set->name, MAX_GRAPH_BYTES, &set->size, why);
  if (!set->text) return false;
  if (!digest_is(hex, set->text, set->size, found) || !names_its_gpus(plan, set))
    return explain(why, "%.200s is not the file of the index", set->name);
  if (set->size > plan->largest_graph) plan->largest_graph = set->size;
  return true;
}

/* Read `NODES=1,0,0`: the NUMA node of each GPU of a set. */
static bool parse_nodes(struct set *set, const char *text) {
  int64_t node;
  if (strncmp(text, "NODES=", 6) != 0) return false;
  text += 6;
  for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
    if (!(set->gpus >> gpu & 1)) continue;
    text = number(text, MAX_NODE, &node);
    bool last = !(set->gpus >> gpu >> 1);
    if (!text || *text++ != (last ? '\0' : ',')) return false;
    set->nodes[gpu] = (int16_t)node;
  }
  return set->placed = true;
}

static bool parse_set(struct plan *plan, struct reader *reader, char *why) {
  if (plan->set_count == MAX_SETS || reader->count > 5) return false;
  struct set *set = &plan->sets[plan->set_count];
  if (!parse_gpus(plan, reader->fields[1], &set->gpus)) return false;
  if (plan->set_count > 0 && set[-1].gpus >= set->gpus) return false;
  set->name = reader->fields[2];
  if (reader->count == 5 && !parse_nodes(set, reader->fields[4])) return false;
  plan->placed |= set->placed;
  plan->set_count++; /* counted before it is read, so that plan_free finds its text */
  return read_graph(plan, set, reader->fields[3], why);
}

static int place(const char *word, const char *const *words) {
  for (int i = 0; words[i]; i++)
    if (strcmp(word, words[i]) == 0) return i;
  return -1;
}

/* Read a range of sizes of a set's table; ranges ascend and do not overlap. */
static bool parse_tune(struct plan *plan, char **fields) {
  static const char *const collectives[] = {"broadcast",      "reduce",     "all_gather",
                                            "reduce_scatter", "all_reduce", NULL};
  static const char *const algorithms[] = {"tree", "ring", NULL};
  static const char *const protocols[] = {"ll", "ll128", "simple", NULL};
  if (plan->tune_count == MAX_TUNES) return false;
  struct tune *tune = &plan->tunes[plan->tune_count];
  const char *from = number(fields[3], MAX_BYTES, &tune->from);
  const char *to = number(fields[4], MAX_BYTES, &tune->to);
  tune->collective = place(fields[2], collectives);
  tune->algorithm = place(fields[5], algorithms);
  tune->protocol = place(fields[6], protocols);
  if (!parse_gpus(plan, fields[1], &tune->gpus) || !from || *from || !to || *to ||
      tune->from > tune->to || tune->collective < 0 || tune->algorithm < 0 || tune->protocol < 0 ||
      !whole_number(fields[7], MAX_CHANNELS, &tune->channels) || tune->channels < 0)
    return false;
  const struct tune *last = plan->tune_count++ > 0 ? tune - 1 : NULL;
  if (!last || last->gpus != tune->gpus) return !last || last->gpus < tune->gpus;
  return last->collective == tune->collective ? last->to < tune->from
                                              : last->collective < tune->collective;
}

/* Read `2.28`, or `-`: not known. */
static bool parse_nccl(struct plan *plan, char *text) {
  char *minor = strchr(text, '.');
  plan->nccl_major = plan->nccl_minor = -1;
  if (strcmp(text, "-") == 0) return true;
  if (minor) *minor++ = '\0';
  return minor && whole_number(text, 99, &plan->nccl_major) && plan->nccl_major >= 0 &&
         whole_number(minor, 99, &plan->nccl_minor) && plan->nccl_minor >= 0;
}

/* The kinds of lines behind the digest, in this order; the first four are there once each. */
enum kind { PROVENANCE, NCCL, DRIVER, NUMA, JOB, GPU, NEED, GIVE, MUST, FORBID, SET, TUNE, END, KINDS };
static const struct {
  const char *word;
  int fields; /* 0: four or more */
} kinds[KINDS] = {{"provenance", 2}, {"nccl", 2}, {"driver", 2}, {"numa", 2}, {"job", 2},
                  {"gpu", 4}, {"need", 3}, {"give", 3}, {"must", 3}, {"forbid", 2},
                  {"set", 0}, {"tune", 8}, {"end", 1}};

static bool parse_line(struct plan *plan, struct reader *reader, enum kind kind, char *why) {
  char **fields = reader->fields;
  switch (kind) {
  case PROVENANCE:
    plan->simulated = strcmp(fields[1], "simulated") == 0;
    return plan->simulated || strcmp(fields[1], "measured") == 0;
  case NCCL: return parse_nccl(plan, fields[1]);
  case DRIVER: return whole_number(fields[1], 9999, &plan->driver);
  case NUMA: return whole_number(fields[1], 1024, &plan->numa);
  case JOB: return whole_number(fields[1], MAX_JOB_RANKS, &plan->job) && plan->job >= 2;
  case GPU: return parse_gpu(plan, fields);
  case NEED: return parse_variable(&plan->need, fields[1], fields[2], true);
  case GIVE: return parse_variable(&plan->give, fields[1], fields[2], true);
  case MUST: return parse_variable(&plan->must, fields[1], fields[2], false);
  case FORBID: return parse_variable(&plan->forbid, fields[1], NULL, false);
  case SET: return parse_set(plan, reader, why);
  case TUNE: return parse_tune(plan, fields);
  default: /* the end */
    return *reader->at == '\0' && plan->gpu_count > 0 &&
           (plan->job == 0 || (plan->set_count == 1 && plan->tune_count == 0));
  }
}

static bool parse_body(struct plan *plan, struct reader *reader, char *why) {
  for (int last = -1, kind = 0; kind != END; last = kind) {
    if (!next_line(reader)) return false;
    for (kind = 0; kind < KINDS && strcmp(reader->fields[0], kinds[kind].word) != 0;) kind++;
    int fields = kind < KINDS ? kinds[kind].fields : -1;
    bool ordered = last < NUMA ? kind == last + 1 : kind > last || (kind == last && kind > JOB);
    if (!ordered || (fields ? reader->count != fields : reader->count < 4)) return false;
    if (!parse_line(plan, reader, (enum kind)kind, why)) return false;
  }
  return true;
}

/* Check an index against its digest, then read it. */
static bool parse_index(struct plan *plan, size_t size, char why[MAX_REASON]) {
  struct reader reader = {.at = plan->data};
  static const char head[] = "tccl-index 2\ndigest ";
  if (strlen(plan->data) != size || strncmp(plan->data, head, sizeof head - 1) != 0 ||
      !next_line(&reader) || !next_line(&reader) || reader.count != 2)
    return explain(why, "%.200s is no index that this plugin reads", plan->path);
  size_t rest = size - (size_t)(reader.at - plan->data);
  if (!digest_is(reader.fields[1], reader.at, rest, plan->digest))
    return explain(why, "%.200s has another digest than it says", plan->path);
  why[0] = '\0';
  if (parse_body(plan, &reader, why)) return true;
  return why[0] ? false : explain(why, "%.200s: line %d is wrong", plan->path, reader.line);
}

/* Return the plan of an index, which keeps the path, or NULL and why not. */
struct plan *plan_load(char *path, char why[MAX_REASON]) {
  char *slash = strrchr(path, '/');
  size_t size;
  if (path[0] != '/') return explain(why, "%.200s is no absolute path", path), NULL;
  struct plan *plan = calloc(1, sizeof *plan);
  if (!plan) return explain(why, "no memory"), NULL;
  plan->path = path;
  *slash = '\0';
  plan->folder = open_trusted(-1, path, true, why);
  *slash = '/';
  if (plan->folder >= 0)
    plan->data = read_trusted(plan->folder, slash + 1, MAX_INDEX_BYTES, &size, why);
  bool good = plan->data && parse_index(plan, size, why);
  if (plan->folder >= 0) close(plan->folder);
  if (good) return plan;
  plan_free(plan);
  return NULL;
}

void plan_free(struct plan *plan) {
  for (int i = 0; i < plan->set_count; i++) free(plan->sets[i].text);
  free(plan->data);
  free(plan);
}

/* Return what a set of GPUs gets, or NULL. */
const struct set *plan_set(const struct plan *plan, uint64_t gpus) {
  for (int i = 0; i < plan->set_count; i++)
    if (plan->sets[i].gpus == gpus) return &plan->sets[i];
  return NULL;
}

/* Return the first range of a set's table, or NULL. */
const struct tune *plan_table(const struct plan *plan, uint64_t gpus) {
  for (int i = 0; i < plan->tune_count; i++)
    if (plan->tunes[i].gpus == gpus) return &plan->tunes[i];
  return NULL;
}

const char *variable_of(const struct variables *variables, const char *name) {
  for (int i = 0; i < variables->count; i++)
    if (strcmp(variables->items[i].name, name) == 0) return variables->items[i].value;
  return NULL;
}
