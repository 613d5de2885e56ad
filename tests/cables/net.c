/* A network of cables for NCCL, as a net plugin (v10): hosts of one machine whose functions reach only
 * what the file CABLES_FILE has, a line "HOST FUNCTION HOST FUNCTION" for each cable between functions.
 *
 * Data goes over sockets of 127.0.0.1. CABLES_HOST is this process's host, CABLES_NAMES its functions
 * ("rocep1s0f0,rocep1s0f1"), the devices in this order. Each connection writes a line to CABLES_LOG:
 *   send HOST ASKED USED HOST LISTENED      (device numbers; ASKED is NCCL's choice)
 *   refused HOST ASKED HOST LISTENED
 * With NCCL_IB_SUBNET_AWARE_ROUTING=1 a function without a cable to the other end gives way, as
 * NCCL 2.30.7 and newer do with a subnet for each cable: first the sender's, then the listener's.
 *
 * Layouts of structures: the public plugin interface of NCCL, written down anew.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { OK, SYSTEM_ERROR = 2 };
enum { LOG_WARN = 2, SUBSYS_NET = 16 };
enum { MAX_CABLES = 256, MAX_NICS = 32, QUEUE = 64, REFUSED = 255 };

typedef struct { int ndevs, devs[4]; } VDevice;
typedef struct {
  char *name, *pci_path;
  uint64_t guid;
  int pointers, global_registration, force_flush, speed, port;
  float latency;
  int max_comms, max_recvs, device_type, device_version;
  VDevice virtual_device;
  size_t max_p2p_bytes, max_coll_bytes;
} Properties;
typedef void (*Logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

static struct { int host[2], nic[2]; } cables[MAX_CABLES];
static int cable_count, own_host, nic_count, aware;
static char *nic_names[MAX_NICS];
static Logger logger;

static void record(const char *format, ...) {
  const char *path = getenv("CABLES_LOG");
  char line[200];
  va_list rest;
  va_start(rest, format);
  int size = vsnprintf(line, sizeof line, format, rest);
  va_end(rest);
  int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0644) : -1;
  if (file >= 0 && write(file, line, (size_t)size) < 0) perror("CABLES_LOG");
  if (file >= 0) close(file);
}

/* Whether a cable joins two functions. */
static int joined(int host, int nic, int other, int far) {
  for (int i = 0; i < cable_count; i++)
    for (int end = 0; end < 2; end++)
      if (cables[i].host[end] == host && cables[i].nic[end] == nic && cables[i].host[!end] == other &&
          cables[i].nic[!end] == far)
        return 1;
  return 0;
}

/* The function of `host` that is used with `far` of `other`: `nic`, or the first with a cable. */
static int routed(int host, int nic, int other, int far) {
  if (joined(host, nic, other, far) || !aware) return nic;
  for (int i = 0; i < nic_count; i++)
    if (joined(host, i, other, far)) return i;
  return nic;
}

static int net_init(Logger log, void *profiler) {
  (void)profiler;
  logger = log;
  const char *path = getenv("CABLES_FILE"), *host = getenv("CABLES_HOST"), *names = getenv("CABLES_NAMES");
  const char *routing = getenv("NCCL_IB_SUBNET_AWARE_ROUTING");
  FILE *file = path && host && names ? fopen(path, "r") : NULL;
  if (!file) return SYSTEM_ERROR;
  aware = routing && atoi(routing);
  own_host = atoi(host);
  for (cable_count = 0; cable_count < MAX_CABLES; cable_count++)
    if (fscanf(file, "%d %d %d %d", &cables[cable_count].host[0], &cables[cable_count].nic[0],
               &cables[cable_count].host[1], &cables[cable_count].nic[1]) != 4)
      break;
  fclose(file);
  char *rest = strdup(names);
  for (nic_count = 0; nic_count < MAX_NICS && (nic_names[nic_count] = strsep(&rest, ",")); nic_count++) {}
  return OK;
}

static int net_devices(int *count) { return *count = nic_count, OK; }

static int net_properties(int device, Properties *out) {
  *out = (Properties){.name = nic_names[device],
                      .guid = (uint64_t)device + 1,
                      .pointers = 1, /* host memory */
                      .speed = 200000,
                      .max_comms = 65536,
                      .max_recvs = 1,
                      .virtual_device = {1, {device}},
                      .max_p2p_bytes = (size_t)1 << 40,
                      .max_coll_bytes = (size_t)1 << 40};
  return OK;
}

typedef struct { int host, nic; uint16_t port; int socket, used; char asked; } Handle; /* of 128 bytes */
typedef struct { int socket, nic; } Listener;
typedef struct Link Link;
typedef struct { Link *link; char *data; uint64_t size, done, header; int headed, active, over; } Request;
struct Link { int socket, sends; Request queue[QUEUE]; unsigned first, next; };
typedef struct { int host, nic; } Hello;

static int whole(int socket, void *data, size_t size, int sends) {
  for (size_t done = 0; done < size;) {
    ssize_t n = sends ? send(socket, (char *)data + done, size - done, MSG_NOSIGNAL)
                      : recv(socket, (char *)data + done, size - done, 0);
    if (n == 0 || (n < 0 && errno != EINTR)) return SYSTEM_ERROR;
    if (n > 0) done += (size_t)n;
  }
  return OK;
}

static Link *linked(int socket, int sends) {
  Link *link = calloc(1, sizeof *link);
  int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(socket, F_SETFL, O_NONBLOCK);
  link->socket = socket, link->sends = sends;
  return link;
}

static int net_listen(int device, void *handle, void **listener) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof at;
  Listener *made = calloc(1, sizeof *made);
  made->socket = socket(AF_INET, SOCK_STREAM, 0), made->nic = device;
  if (bind(made->socket, (void *)&at, size) || listen(made->socket, 64) ||
      getsockname(made->socket, (void *)&at, &size))
    return SYSTEM_ERROR;
  fcntl(made->socket, F_SETFL, O_NONBLOCK);
  memset(handle, 0, 128);
  *(Handle *)handle = (Handle){own_host, device, at.sin_port, -1, -1, 0};
  return *listener = made, OK;
}

static int refuse(int asked, int host, int nic) {
  record("refused %d %d %d %d\n", own_host, asked, host, nic);
  if (logger)
    logger(LOG_WARN, SUBSYS_NET, __func__, __LINE__, "no cable joins %s of host %d and function %d of host %d",
           nic_names[asked], own_host, nic, host);
  return SYSTEM_ERROR;
}

static int net_connect(int device, void *config, void *opaque, void **out, void **device_handle) {
  (void)config, (void)device_handle;
  Handle *handle = opaque;
  *out = NULL;
  if (!handle->asked) {
    struct sockaddr_in at = {AF_INET, handle->port, {htonl(INADDR_LOOPBACK)}, {0}};
    handle->used = routed(own_host, device, handle->host, handle->nic);
    handle->socket = socket(AF_INET, SOCK_STREAM, 0);
    Hello hello = {own_host, handle->used};
    if (connect(handle->socket, (void *)&at, sizeof at) || whole(handle->socket, &hello, sizeof hello, 1))
      return SYSTEM_ERROR;
    handle->asked = 1;
  }
  struct pollfd ready = {handle->socket, POLLIN, 0};
  if (poll(&ready, 1, 0) < 1) return OK;
  unsigned char answer = REFUSED; /* else the function that the other end uses */
  if (whole(handle->socket, &answer, 1, 0) || answer == REFUSED) {
    close(handle->socket);
    return refuse(device, handle->host, handle->nic);
  }
  record("send %d %d %d %d %d\n", own_host, device, handle->used, handle->host, answer);
  return *out = linked(handle->socket, 1), OK;
}

static int net_accept(void *opaque, void **out, void **device_handle) {
  (void)device_handle;
  Listener *listener = opaque;
  *out = NULL;
  int socket = accept(listener->socket, NULL, NULL);
  if (socket < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? OK : SYSTEM_ERROR;
  Hello hello;
  if (whole(socket, &hello, sizeof hello, 0)) return SYSTEM_ERROR;
  int used = routed(own_host, listener->nic, hello.host, hello.nic);
  int fits = joined(own_host, used, hello.host, hello.nic);
  unsigned char answer = fits ? (unsigned char)used : REFUSED;
  if (whole(socket, &answer, 1, 1)) return SYSTEM_ERROR;
  if (!fits) {
    close(socket);
    return refuse(listener->nic, hello.host, hello.nic);
  }
  return *out = linked(socket, 0), OK;
}

static int net_register(void *link, void *data, size_t size, int type, void **out) {
  (void)link, (void)data, (void)size;
  *out = NULL;
  return type == 1 ? OK : SYSTEM_ERROR;
}
static int net_deregister(void *link, void *handle) { return (void)link, (void)handle, OK; }

static int queued(Link *link, void *data, size_t size, void **out) {
  *out = NULL;
  Request *request = &link->queue[link->next % QUEUE];
  if (request->active) return OK; /* full: NCCL asks again */
  *request = (Request){.link = link, .data = data, .size = size, .header = size, .active = 1};
  link->next++;
  return *out = request, OK;
}
static int net_send(void *link, void *data, size_t size, int tag, void *handle, void *profile, void **out) {
  (void)tag, (void)handle, (void)profile;
  return queued(link, data, size, out);
}
static int net_receive(void *link, int n, void **data, size_t *sizes, int *tags, void **handles,
                       void **profiles, void **out) {
  (void)n, (void)tags, (void)handles, (void)profiles;
  return queued(link, data[0], sizes[0], out);
}
static int net_flush(void *link, int n, void **data, int *sizes, void **handles, void **out) {
  (void)link, (void)n, (void)data, (void)sizes, (void)handles;
  return *out = NULL, OK;
}

/* Moves what can be moved of the oldest request: its size, then its bytes. Returns 1 if it is done. */
static int moved(Link *link, Request *request) {
  for (;;) {
    char *at = request->headed ? request->data + request->done : (char *)&request->header + request->done;
    size_t left = (request->headed ? request->size : sizeof request->header) - request->done;
    if (left) {
      ssize_t n = link->sends ? send(link->socket, at, left, MSG_NOSIGNAL) : recv(link->socket, at, left, 0);
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
      if (n <= 0) return -1;
      request->done += (uint64_t)n;
      if ((size_t)n < left) continue;
    }
    if (request->headed) return 1;
    if (request->header > request->size) return -1; /* more than there is room for */
    request->size = request->header, request->headed = 1, request->done = 0;
  }
}

static int net_test(void *opaque, int *done, int *size) {
  Request *request = opaque;
  Link *link = request->link;
  *done = 0;
  while (link->first != link->next) {
    Request *oldest = &link->queue[link->first % QUEUE];
    int state = moved(link, oldest);
    if (state < 0) return SYSTEM_ERROR;
    if (!state) break;
    oldest->over = 1;
    link->first++;
  }
  if (!request->over) return OK;
  if (size) *size = (int)request->size;
  request->active = 0;
  return *done = 1, OK;
}

static int net_close(void *opaque) {
  Link *link = opaque;
  close(link->socket);
  free(link);
  return OK;
}
static int net_close_listener(void *opaque) {
  Listener *listener = opaque;
  close(listener->socket);
  free(listener);
  return OK;
}

__attribute__((visibility("default"))) struct {
  const char *name;
  int (*init)(Logger, void *);
  int (*devices)(int *);
  int (*properties)(int, Properties *);
  int (*listen)(int, void *, void **);
  int (*connect)(int, void *, void *, void **, void **);
  int (*accept)(void *, void **, void **);
  int (*reg)(void *, void *, size_t, int, void **);
  void *reg_dmabuf;
  int (*dereg)(void *, void *);
  int (*send)(void *, void *, size_t, int, void *, void *, void **);
  int (*receive)(void *, int, void **, size_t *, int *, void **, void **, void **);
  int (*flush)(void *, int, void **, int *, void **, void **);
  int (*test)(void *, int *, int *);
  int (*close_send)(void *);
  int (*close_receive)(void *);
  int (*close_listener)(void *);
  void *get_device_mr, *receive_consumed, *make_virtual_device;
} ncclNetPlugin_v10 = {
    "Cables", net_init,     net_devices, net_properties, net_listen, net_connect, net_accept,
    net_register, NULL,     net_deregister, net_send,    net_receive, net_flush,  net_test,
    net_close, net_close,   net_close_listener, NULL,    NULL,       NULL,
};
