/* Clock, sockets and buffers that the mock backend and the load generator share. */
#ifndef NET_H
#define NET_H

#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

#define SECOND_NS INT64_C(1000000000)
#define NEVER INT64_MAX

/* Bytes that grow at the end and are consumed at the start. */
struct buffer {
    char *data;
    size_t size, capacity;
};

void buffer_append(struct buffer *buffer, const char *data, size_t size);
void buffer_drop(struct buffer *buffer, size_t size);
void buffer_free(struct buffer *buffer);

/* Nanoseconds of CLOCK_MONOTONIC, which both programs see alike on one machine. */
int64_t now_ns(void);

/* Says what failed and why, and ends the program. */
_Noreturn void die(const char *what);

/* Raises the limit of open files as far as allowed, and makes timers precise. */
void prepare_process(void);

/* A listening socket on loopback; port 0 picks a free one. The port goes to *bound. */
int listen_on(int port, int *bound);

/* A socket that connects, or is connected, to loopback; -1 when it was refused at once. */
int connect_to(int port);

/* Non-blocking and without Nagle's delay. */
void tune_socket(int fd);

/* Edge-triggered reads and writes of fd, reported with `owner`. */
void watch(int poller, int fd, void *owner);

/* epoll_wait that ends at the instant `due` with the precision of nanoseconds. */
int wait_until(int poller, struct epoll_event *events, int capacity, int64_t due);

#endif
