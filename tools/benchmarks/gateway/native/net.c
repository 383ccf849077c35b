#define _GNU_SOURCE
#include "net.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BACKLOG 4096

void buffer_append(struct buffer *buffer, const char *data, size_t size) {
    if (buffer->size + size > buffer->capacity) {
        buffer->capacity = 2 * (buffer->size + size);
        buffer->data = realloc(buffer->data, buffer->capacity);
        if (!buffer->data) die("out of memory");
    }
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

void buffer_drop(struct buffer *buffer, size_t size) {
    buffer->size -= size;
    if (buffer->size) memmove(buffer->data, buffer->data + size, buffer->size);
}

void buffer_free(struct buffer *buffer) {
    free(buffer->data);
    *buffer = (struct buffer){0};
}

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

void die(const char *what) {
    if (errno) perror(what);
    else fprintf(stderr, "%s\n", what);
    exit(2);
}

void prepare_process(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    /* By default the kernel fires timers up to 50 microseconds late. */
    prctl(PR_SET_TIMERSLACK, 1UL);
}

void tune_socket(int fd) {
    int on = 1;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static struct sockaddr_in loopback(int port) {
    return (struct sockaddr_in){
        .sin_family = AF_INET,
        .sin_port = htons((uint16_t)port),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
}

int listen_on(int port, int *bound) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in address = loopback(port);
    socklen_t size = sizeof address;
    if (fd < 0) die("socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&address, size) < 0) die("bind");
    if (listen(fd, BACKLOG) < 0) die("listen");
    getsockname(fd, (struct sockaddr *)&address, &size);
    *bound = ntohs(address.sin_port);
    tune_socket(fd);
    return fd;
}

int connect_to(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = loopback(port);
    if (fd < 0) die("socket");
    tune_socket(fd);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS) {
        close(fd);
        return -1;
    }
    return fd;
}

void watch(int poller, int fd, void *owner) {
    struct epoll_event event = {
        .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
        .data.ptr = owner,
    };
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0) die("epoll_ctl");
}

int wait_until(int poller, struct epoll_event *events, int capacity, int64_t due) {
    struct timespec timeout = {0};
    if (due != NEVER) {
        int64_t left = due - now_ns();
        if (left > 0) timeout = (struct timespec){left / SECOND_NS, left % SECOND_NS};
    }
    int count = epoll_pwait2(poller, events, capacity, due == NEVER ? NULL : &timeout, NULL);
    if (count < 0 && errno != EINTR) die("epoll_pwait2 (needs Linux 5.11)");
    return count < 0 ? 0 : count;
}
