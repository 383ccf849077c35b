/* A backend that answers like an OpenAI server, as fast as one thread can.
 *
 *   mock [PORT]     prints the port it listens on; without PORT it picks a free one
 *
 * A chat request is answered with a small completion. With "stream": true it is answered with
 * `max_tokens` server-sent events of 250 bytes, one every `seed` microseconds (0 or none: without
 * delay). Every gateway passes these two fields on, but not every one passes headers or `user`.
 * The text of an event begins with '@' and the instant at which it was sent, in nanoseconds of
 * CLOCK_MONOTONIC.
 */
#define _GNU_SOURCE
#include "http.h"
#include "net.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS 1024
#define READ_SIZE 65536
#define DEFAULT_CHUNKS 64
#define STAMP_DIGITS 20
#define EVENT_SIZE 250
#define FRAMED_SIZE (4 + EVENT_SIZE + 2)
/* Parameters are before or after the messages, so only both ends of a body are searched. */
#define PARAMETERS_SIZE 2048

struct connection {
    int fd;
    bool in_body, closing;
    struct head head;
    struct body body;
    struct buffer input, content, output;
    /* The stream that is being sent, and its place in the queue of those that are due. */
    long chunks_left;
    int64_t gap, due;
    bool queued;
    struct connection *previous, *next;
};

struct mock {
    int poller, listener;
    /* Ordered by `due`: a stream that has sent an event moves to the end, or near it. */
    struct connection *first, *last;
    /* A framed event, followed by everything that ends a stream. */
    char event[FRAMED_SIZE + 1024];
    size_t ending_size;
    char *stamp;
    char scratch[READ_SIZE];
};

static const char COMPLETION[] =
    "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\","
    "\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":"
    "\"assistant\",\"content\":\"The quick brown fox jumps over the lazy dog while the band plays "
    "on.\",\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],"
    "\"usage\":{\"prompt_tokens\":64,\"total_tokens\":80,\"completion_tokens\":16}}";
static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1700000000,"
    "\"owned_by\":\"mock\",\"root\":\"mock\",\"max_model_len\":131072}]}";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    "transfer-encoding: chunked\r\n\r\n";
#define CHUNK_FIELDS                                                                           \
    "data: {\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\","                    \
    "\"created\":1700000000,\"model\":\"mock\",\"choices\":["
static const char EVENT_START[] = CHUNK_FIELDS "{\"index\":0,\"delta\":{\"content\":\"@";
static const char EVENT_END[] = "\"},\"finish_reason\":null}]}\n\n";
static const char *const ENDING[] = {
    CHUNK_FIELDS "{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
    CHUNK_FIELDS "],\"usage\":{\"prompt_tokens\":64,\"total_tokens\":128,"
                 "\"completion_tokens\":64}}\n\n",
    "data: [DONE]\n\n",
};

static void prepare_event(struct mock *mock) {
    char *text = mock->event + sprintf(mock->event, "%x\r\n", EVENT_SIZE);
    memset(text, '.', EVENT_SIZE);
    memcpy(text, EVENT_START, sizeof EVENT_START - 1);
    memcpy(text + EVENT_SIZE - (sizeof EVENT_END - 1), EVENT_END, sizeof EVENT_END - 1);
    memcpy(text + EVENT_SIZE, "\r\n", 2);
    mock->stamp = text + sizeof EVENT_START - 1;
    char *end = text + EVENT_SIZE + 2;
    for (size_t i = 0; i < sizeof ENDING / sizeof *ENDING; i++)
        end += sprintf(end, "%zx\r\n%s\r\n", strlen(ENDING[i]), ENDING[i]);
    end += sprintf(end, "0\r\n\r\n");
    mock->ending_size = (size_t)(end - (text + EVENT_SIZE + 2));
}

static void enqueue(struct mock *mock, struct connection *connection) {
    struct connection *before = mock->last;
    while (before && before->due > connection->due) before = before->previous;
    connection->previous = before;
    connection->next = before ? before->next : mock->first;
    *(connection->next ? &connection->next->previous : &mock->last) = connection;
    *(before ? &before->next : &mock->first) = connection;
    connection->queued = true;
}

static void dequeue(struct mock *mock, struct connection *connection) {
    if (!connection->queued) return;
    *(connection->next ? &connection->next->previous : &mock->last) = connection->previous;
    *(connection->previous ? &connection->previous->next : &mock->first) = connection->next;
    connection->queued = false;
}

static void hang_up(struct mock *mock, struct connection *connection) {
    dequeue(mock, connection);
    close(connection->fd);
    buffer_free(&connection->input);
    buffer_free(&connection->content);
    buffer_free(&connection->output);
    free(connection);
}

/* False when the peer is gone. What does not fit into the socket waits in `output`. */
static bool deliver(struct connection *connection, const char *data, size_t size) {
    if (!connection->output.size) {
        ssize_t sent = send(connection->fd, data, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return false;
        if (sent > 0) data += sent, size -= (size_t)sent;
    }
    if (size) buffer_append(&connection->output, data, size);
    return true;
}

static bool answer(struct connection *connection, const char *status, const char *json) {
    char text[1024];
    int size = snprintf(text, sizeof text,
                        "HTTP/1.1 %s\r\nserver: mock\r\ncontent-type: application/json\r\n"
                        "content-length: %zu\r\n\r\n%s",
                        status, strlen(json), json);
    return deliver(connection, text, (size_t)size);
}

/* What follows `word` in the text, or NULL. */
static const char *after(const char *text, size_t size, const char *word) {
    const char *found = memmem(text, size, word, strlen(word));
    return found ? found + strlen(word) : NULL;
}

/* The value of a parameter of a JSON body, which ends with a zero byte; NULL without one. */
static const char *parameter(const struct buffer *body, const char *name) {
    size_t length = body->size - 1, window = length < PARAMETERS_SIZE ? length : PARAMETERS_SIZE;
    const char *value = after(body->data + length - window, window, name);
    if (!value) value = after(body->data, window, name);
    return value ? value + strspn(value, " :=\"") : NULL;
}

static bool start_stream(struct mock *mock, struct connection *connection) {
    const char *chunks = parameter(&connection->content, "\"max_tokens\"");
    if (!chunks) chunks = parameter(&connection->content, "\"max_completion_tokens\"");
    const char *gap = parameter(&connection->content, "\"seed\"");
    connection->chunks_left = chunks ? atol(chunks) : 0;
    if (connection->chunks_left < 1) connection->chunks_left = DEFAULT_CHUNKS;
    connection->gap = gap ? atoll(gap) * 1000 : 0;
    connection->due = now_ns();
    enqueue(mock, connection);
    return deliver(connection, STREAM_HEAD, sizeof STREAM_HEAD - 1);
}

static bool respond(struct mock *mock, struct connection *connection) {
    const char *line = connection->input.data;
    const char *path = after(line, connection->head.size, " ");
    buffer_append(&connection->content, "", 1);
    if (strncmp(line, "POST ", 5) == 0 && strncmp(path, "/v1/chat/completions", 20) == 0) {
        const char *stream = parameter(&connection->content, "\"stream\"");
        if (stream && strncmp(stream, "true", 4) == 0) return start_stream(mock, connection);
        return answer(connection, "200 OK", COMPLETION);
    }
    if (strncmp(path, "/v1/models", 10) == 0) return answer(connection, "200 OK", MODELS);
    if (strncmp(path, "/health", 7) == 0) return answer(connection, "200 OK", "{}");
    return answer(connection, "404 Not Found", "{\"error\":{\"message\":\"not mocked\"}}");
}

static void keep_content(void *owner, const char *data, size_t size) {
    buffer_append(owner, data, size);
}

static enum outcome read_request(struct connection *connection) {
    struct buffer *input = &connection->input;
    struct head *head = &connection->head;
    if (!connection->in_body) {
        enum outcome outcome = head_parse(head, input->data, input->size);
        if (outcome != COMPLETE) return outcome;
        body_start(&connection->body, head);
        connection->content.size = 0;
        connection->in_body = true;
        connection->closing = head->close;
        if (head->expects_continue && input->size == head->size)
            deliver(connection, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    }
    size_t used;
    /* The head stays in `input` until the answer, which needs its first line. */
    enum outcome outcome = body_feed(&connection->body, input->data + head->size,
                                     input->size - head->size, &used, keep_content,
                                     &connection->content);
    memmove(input->data + head->size, input->data + head->size + used,
            input->size - head->size - used);
    input->size -= used;
    return outcome;
}

/* Whether everything is sent to a peer that asked us to close. */
static bool is_over(const struct connection *connection) {
    return connection->closing && !connection->in_body && !connection->chunks_left &&
           !connection->output.size;
}

/* Answers what has arrived, one request after the other. False ends the connection. */
static bool serve(struct mock *mock, struct connection *connection) {
    while (connection->input.size && !connection->chunks_left) {
        enum outcome outcome = read_request(connection);
        if (outcome == INCOMPLETE) return true;
        if (outcome == MALFORMED || !respond(mock, connection)) return false;
        buffer_drop(&connection->input, connection->head.size);
        connection->in_body = false;
        if (connection->closing) break;
    }
    return !is_over(connection);
}

static bool read_input(struct mock *mock, struct connection *connection, bool ends) {
    for (;;) {
        ssize_t got = recv(connection->fd, mock->scratch, READ_SIZE, 0);
        if (got < 0) return errno == EAGAIN;
        if (got == 0) return false;
        buffer_append(&connection->input, mock->scratch, (size_t)got);
        if (!serve(mock, connection)) return false;
        /* A short read means that no more bytes are here, unless the connection has ended. */
        if (got < READ_SIZE && !ends) return true;
    }
}

static bool flush_output(struct mock *mock, struct connection *connection) {
    struct buffer *output = &connection->output;
    if (!output->size) return true;
    ssize_t sent = send(connection->fd, output->data, output->size, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN;
    buffer_drop(output, (size_t)sent);
    /* Continue a stream that stopped because its reader was slow. */
    if (!output->size && connection->chunks_left && !connection->queued) enqueue(mock, connection);
    return !is_over(connection);
}

static void accept_all(struct mock *mock) {
    int fd;
    while ((fd = accept4(mock->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct connection *connection = calloc(1, sizeof *connection);
        if (!connection) die("out of memory");
        connection->fd = fd;
        tune_socket(fd);
        watch(mock->poller, fd, connection);
    }
}

static bool send_event(struct mock *mock, struct connection *connection) {
    int64_t sent_at = now_ns();
    for (int i = STAMP_DIGITS - 1; i >= 0; i--, sent_at /= 10)
        mock->stamp[i] = (char)('0' + sent_at % 10);
    bool last = --connection->chunks_left == 0;
    if (!deliver(connection, mock->event, FRAMED_SIZE + (last ? mock->ending_size : 0)))
        return false;
    if (last) return serve(mock, connection);
    /* Events keep their gap; after a pause the missed events are not sent in a burst. */
    connection->due += connection->gap;
    int64_t now = now_ns();
    if (connection->due < now) connection->due = now;
    if (!connection->output.size) enqueue(mock, connection);
    return true;
}

/* One event of every stream that is due, so that streams without a gap take turns. */
static void send_due(struct mock *mock) {
    int64_t now = now_ns();
    while (mock->first && mock->first->due <= now) {
        struct connection *connection = mock->first;
        dequeue(mock, connection);
        if (!send_event(mock, connection)) hang_up(mock, connection);
    }
}

int main(int count, char **arguments) {
    static struct mock mock;
    struct epoll_event events[EVENTS];
    int port = count > 1 ? atoi(arguments[1]) : 0;
    if (count > 1 && !port) die("usage: mock [PORT]");
    prepare_process();
    prepare_event(&mock);
    mock.poller = epoll_create1(EPOLL_CLOEXEC);
    mock.listener = listen_on(port, &port);
    watch(mock.poller, mock.listener, &mock);
    printf("%d\n", port);
    fflush(stdout);
    for (;;) {
        int ready = wait_until(mock.poller, events, EVENTS, mock.first ? mock.first->due : NEVER);
        for (int i = 0; i < ready; i++) {
            struct connection *connection = events[i].data.ptr;
            bool ends = events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
            if (events[i].data.ptr == &mock) accept_all(&mock);
            else if (!flush_output(&mock, connection) || !read_input(&mock, connection, ends))
                hang_up(&mock, connection);
        }
        send_due(&mock);
    }
}
