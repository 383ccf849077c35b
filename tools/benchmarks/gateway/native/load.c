/* A load generator for gateways: options.c says what it does. */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EVENTS 1024
/* How long the first answers may take, and the answers in flight at the end. */
#define WARM_UP_LIMIT (60 * SECOND_NS)
#define DRAIN_LIMIT (60 * SECOND_NS)
/* Held streams are opened evenly over this time: no listen queue takes them all at once. */
#define OPENING_NS SECOND_NS

/* Streams begin evenly spread over a gap, like streams of independent users. */
static int64_t start_of(const struct options *options, int index) {
    int64_t spread = options->mode == HOLD ? OPENING_NS : options->gap_us * 1000;
    if (options->mode == PLAIN) spread = 0;
    return spread * index / options->connections;
}

static void prepare(struct load *load) {
    const struct options *options = &load->options;
    load->requests = build_requests(options);
    load->connections = calloc((size_t)options->connections, sizeof *load->connections);
    if (!load->connections) die("out of memory");
    load->poller = epoll_create1(EPOLL_CLOEXEC);
    load->fresh = options->connections;
    load->next_start = load->measured_from = NEVER;
    int64_t now = now_ns();
    load->phase_ends = now + WARM_UP_LIMIT;
    for (int i = 0; i < options->connections; i++) {
        struct connection *connection = &load->connections[i];
        connection->load = load;
        connection->request = &load->requests[options->key_count ? i % options->key_count : 0];
        connection->fd = -1;
        connection->fresh = true;
        exchange_schedule(connection, now + start_of(options, i));
    }
}

static void start_due(struct load *load, int64_t now) {
    if (now < load->next_start) return;
    load->next_start = NEVER;
    for (int i = 0; i < load->options.connections; i++) {
        struct connection *connection = &load->connections[i];
        if (!connection->waiting) continue;
        if (connection->start_at <= now) {
            connection->waiting = false;
            load->waiting--;
            exchange_start(connection);
        } else if (connection->start_at < load->next_start) {
            load->next_start = connection->start_at;
        }
    }
}

/* The reason can hold text of a gateway, so quotes and control characters are escaped. */
static void print_reason(const char *reason) {
    printf("\"first_error\": \"");
    for (; *reason; reason++) {
        unsigned char byte = (unsigned char)*reason;
        if (byte == '"' || byte == '\\') printf("\\%c", byte);
        else if (byte >= ' ' && byte < 127) putchar(byte);
        else putchar(' ');
    }
    printf("\"");
}

static void print_result(struct load *load) {
    static const char *const NAMES[] = {"plain", "streams", "hold"};
    const struct options *options = &load->options;
    printf("{\"mode\": \"%s\", \"connections\": %d, \"seconds\": %g, ", NAMES[options->mode],
           options->connections, options->seconds);
    printf("\"answers\": %ld, \"answers_per_second\": %.1f, ", load->answers,
           (double)load->answers / options->seconds);
    printf("\"chunks\": %ld, \"chunks_per_second\": %.1f, ", load->chunks,
           (double)load->chunks / options->seconds);
    printf("\"all_answers\": %ld, \"all_chunks\": %ld, ", load->all_answers, load->all_chunks);
    printf("\"open\": %d, ", load->open);
    samples_print(&load->latency, "latency_ms");
    printf(", ");
    samples_print(&load->first_event, "first_event_ms");
    printf(", ");
    samples_print(&load->delay, "delay_ms");
    printf(", \"errors\": %ld, ", load->errors);
    print_reason(load->reason);
    printf("}\n");
    fflush(stdout);
}

static void begin_measuring(struct load *load, int64_t now) {
    load->phase = MEASURING;
    load->measured_from = now;
    load->phase_ends = now + (int64_t)(load->options.seconds * 1e9);
    /* The benchmark reads this line while the streams are open. */
    if (load->options.mode == HOLD) print_result(load);
}

static void begin_draining(struct load *load, int64_t now) {
    load->phase = DRAINING;
    load->phase_ends = now + DRAIN_LIMIT;
    load->next_start = NEVER;
}

static void fail_unfinished(struct load *load) {
    load->phase = DRAINING;
    for (int i = 0; i < load->options.connections; i++)
        if (load->connections[i].in_flight)
            exchange_fail(&load->connections[i], "no complete answer within a minute");
}

/* False when the run is over. */
static bool advance(struct load *load, int64_t now) {
    bool late = now >= load->phase_ends;
    switch (load->phase) {
        case WARMING:
            if (!load->fresh) begin_measuring(load, now);
            else if (late) fail_unfinished(load);
            return load->phase != DRAINING;
        case MEASURING:
            if (late && load->options.mode == HOLD) return false;
            if (late) begin_draining(load, now);
            return !late || load->in_flight > 0;
        default:
            if (late) fail_unfinished(load);
            return load->in_flight > 0;
    }
}

int main(int count, char **arguments) {
    static struct load load;
    struct epoll_event events[EVENTS];
    load.options = read_options(count, arguments);
    prepare_process();
    prepare(&load);
    for (int64_t now = now_ns(); advance(&load, now); now = now_ns()) {
        start_due(&load, now);
        int64_t due = load.next_start < load.phase_ends ? load.next_start : load.phase_ends;
        int ready = wait_until(load.poller, events, EVENTS, due);
        for (int i = 0; i < ready; i++) exchange_continue(events[i].data.ptr, events[i].events);
    }
    /* Held streams were reported when all were open. Report them here if that never happened. */
    if (load.options.mode != HOLD || load.measured_from == NEVER) print_result(&load);
    return 0;
}
