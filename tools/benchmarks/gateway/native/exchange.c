#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "load.h"

/* After an error a connection pauses, so that it does not flood a gateway that refuses it. */
#define REST_NS (SECOND_NS / 100)

void exchange_schedule(struct connection *connection, int64_t start_at) {
    struct load *load = connection->load;
    connection->waiting = true;
    connection->start_at = start_at;
    load->waiting++;
    if (start_at < load->next_start) load->next_start = start_at;
}

static void hang_up(struct connection *connection) {
    if (connection->fd >= 0) close(connection->fd);
    connection->fd = -1;
}

/* The end of an exchange, with an answer or an error. */
static void leave(struct connection *connection) {
    if (connection->in_flight) connection->load->in_flight--;
    if (connection->fresh) connection->load->fresh--;
    connection->in_flight = connection->fresh = false;
}

void exchange_fail(struct connection *connection, const char *reason) {
    struct load *load = connection->load;
    if (!load->errors++) snprintf(load->reason, sizeof load->reason, "%s", reason);
    hang_up(connection);
    leave(connection);
    if (load->phase != DRAINING) exchange_schedule(connection, now_ns() + REST_NS);
}

static void write_request(struct connection *connection) {
    const struct request *request = connection->request;
    if (!connection->in_flight || connection->written == request->size) return;
    if (!connection->written) connection->sent_at = now_ns();
    ssize_t sent = send(connection->fd, request->text + connection->written,
                        request->size - connection->written, MSG_NOSIGNAL);
    if (sent > 0) connection->written += (size_t)sent;
    /* ENOTCONN: still connecting. Any other error comes again when we read. */
}

void exchange_start(struct connection *connection) {
    struct load *load = connection->load;
    bool connected = connection->fd >= 0;
    connection->in_flight = true;
    load->in_flight++;
    connection->written = connection->head_size = 0;
    connection->in_body = false;
    marks_start(&connection->marks);
    if (!connected && (connection->fd = connect_to(load->options.port)) < 0) {
        exchange_fail(connection, "connection refused");
        return;
    }
    if (!connected) watch(load->poller, connection->fd, connection);
    write_request(connection);
}

/* A request sent in the measured time counts even if its answer comes later: slow ones count. */
static bool is_measured(const struct connection *connection) {
    return connection->sent_at >= connection->load->measured_from;
}

static void on_mark(void *owner, int64_t instant) {
    struct connection *connection = owner;
    struct load *load = connection->load;
    bool first = connection->marks.found == 1;
    load->all_chunks++;
    if (load->phase == MEASURING) {
        load->chunks++;
        samples_add(&load->delay, connection->received_at - instant);
    }
    if (first && is_measured(connection))
        samples_add(&load->first_event, connection->received_at - connection->sent_at);
    if (first && load->options.mode == HOLD && connection->fresh) {
        connection->fresh = false;
        load->fresh--;
        load->open++;
    }
}

static void on_body(void *owner, const char *data, size_t size) {
    struct connection *connection = owner;
    marks_feed(&connection->marks, data, size, on_mark, connection);
}

/* What is wrong with a complete answer, or NULL. */
static const char *fault(const struct connection *connection) {
    const struct marks *marks = &connection->marks;
    const struct options *options = &connection->load->options;
    if (options->mode == PLAIN)
        return marks->first == '{' && marks_end_with(marks, "}") ? NULL : "no JSON in the answer";
    if (marks->found != options->chunks) return "events are missing or doubled";
    return marks_end_with(marks, "[DONE]") ? NULL : "the stream does not end with [DONE]";
}

static void finish(struct connection *connection) {
    struct load *load = connection->load;
    const char *reason = fault(connection);
    if (reason) {
        exchange_fail(connection, reason);
        return;
    }
    load->all_answers++;
    if (load->phase == MEASURING) load->answers++;
    if (is_measured(connection))
        samples_add(&load->latency, connection->received_at - connection->sent_at);
    leave(connection);
    if (connection->head.close || connection->body.part == UNTIL_CLOSE) hang_up(connection);
    if (load->phase != DRAINING) exchange_start(connection);
}

/* Moves *data behind the head of the answer. MALFORMED if the head is not valid or too long. */
static enum outcome take_head(struct connection *connection, const char **data, size_t *size) {
    size_t room = HEAD_SIZE - connection->head_size, taken = *size < room ? *size : room;
    memcpy(connection->head_text + connection->head_size, *data, taken);
    enum outcome outcome = head_parse(&connection->head, connection->head_text,
                                      connection->head_size + taken);
    if (outcome == INCOMPLETE && taken < room) {
        connection->head_size += taken;
        return INCOMPLETE;
    }
    if (outcome != COMPLETE) return MALFORMED;
    size_t used = connection->head.size - connection->head_size;
    *data += used;
    *size -= used;
    connection->head_size = 0;
    if (connection->head.status >= 200) {
        connection->in_body = true;
        body_start(&connection->body, &connection->head);
    }
    return COMPLETE;
}

/* False when the exchange is over. */
static bool take(struct connection *connection, const char *data, size_t size) {
    char reason[REASON_SIZE] = "a malformed answer";
    size_t used = 0;
    enum outcome outcome = COMPLETE;
    while (!connection->in_body && outcome == COMPLETE) {
        outcome = take_head(connection, &data, &size);
        if (outcome == INCOMPLETE) return true;
    }
    if (outcome == COMPLETE && connection->head.status != 200) {
        snprintf(reason, sizeof reason, "status %d: %.*s", connection->head.status,
                 (int)(size < 100 ? size : 100), data);
        outcome = MALFORMED;
    } else if (outcome == COMPLETE) {
        outcome = body_feed(&connection->body, data, size, &used, on_body, connection);
        if (outcome == INCOMPLETE) return true;
        if (used < size) outcome = MALFORMED;
    }
    if (outcome == COMPLETE) finish(connection);
    else exchange_fail(connection, reason);
    return false;
}

static void on_end(struct connection *connection) {
    if (!connection->in_flight) hang_up(connection);
    else if (connection->in_body && connection->body.part == UNTIL_CLOSE) finish(connection);
    else exchange_fail(connection, connection->in_body ? "the connection ended inside an answer"
                                                       : "the connection ended before an answer");
}

void exchange_continue(struct connection *connection, uint32_t events) {
    struct load *load = connection->load;
    bool ends = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
    write_request(connection);
    while (connection->fd >= 0) {
        ssize_t got = recv(connection->fd, load->scratch, sizeof load->scratch, 0);
        if (got < 0 && (errno == EAGAIN || errno == ENOTCONN)) return;
        if (got <= 0) {
            on_end(connection);
            return;
        }
        connection->received_at = now_ns();
        if (!connection->in_flight) {
            exchange_fail(connection, "bytes without a request");
            return;
        }
        /* A short read means that no more bytes are here, unless the connection has ended. After
         * an answer this may be a new connection already; epoll reports its bytes. */
        if (!take(connection, load->scratch, (size_t)got) && !connection->in_flight) return;
        if ((size_t)got < sizeof load->scratch && !ends) return;
    }
}
