/* What the files of the load generator share: its options, its connections and what it counts. */
#ifndef LOAD_H
#define LOAD_H

#include "http.h"
#include "marks.h"
#include "net.h"
#include "samples.h"

#define HEAD_SIZE 16384
#define REASON_SIZE 160

enum mode { PLAIN, STREAMS, HOLD };

struct options {
    enum mode mode;
    int port, connections, body_bytes;
    long chunks, gap_us;
    double seconds;
    const char **keys, **headers;
    int key_count, header_count;
};

/* There is a request for each key; connections use them in turn. */
struct request {
    char *text;
    size_t size;
};

enum phase {
    WARMING,   /* until every connection has had an answer, because opening sockets takes time */
    MEASURING, /* for the time that the user chose */
    DRAINING,  /* no new requests; the answers of those in flight must still come */
};

struct load {
    struct options options;
    struct request *requests;
    struct connection *connections;
    int poller;
    enum phase phase;
    int64_t phase_ends, measured_from;
    /* Connections that wait for their start, and the instant of the first. */
    int waiting;
    int64_t next_start;
    /* fresh: connections without an answer so far. In mode HOLD fresh is without an event so far,
     * and open with one. */
    int fresh, open;
    int in_flight;
    /* answers and chunks: in the measured time; the others: since the start. */
    long answers, chunks, all_answers, all_chunks, errors;
    struct samples latency, first_event, delay;
    char reason[REASON_SIZE]; /* of the first error */
    char scratch[65536];
};

struct connection {
    struct load *load;
    const struct request *request;
    int fd; /* -1 while there is none */
    bool waiting, in_flight, fresh, in_body;
    int64_t start_at; /* while waiting */
    int64_t sent_at, received_at;
    size_t written, head_size;
    struct head head;
    struct body body;
    struct marks marks;
    char head_text[HEAD_SIZE];
};

/* exchange.c: one connection, and the requests it carries one after the other. */
void exchange_schedule(struct connection *connection, int64_t start_at);
void exchange_start(struct connection *connection);
void exchange_continue(struct connection *connection, uint32_t events);
void exchange_fail(struct connection *connection, const char *reason);

/* options.c */
struct options read_options(int count, char **arguments);
struct request *build_requests(const struct options *options);

#endif
