/* The part of HTTP/1.1 that the mock and the load generator need: heads, and framing of bodies. */
#ifndef HTTP_H
#define HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the first line and the headers say about a message. */
struct head {
    size_t size;  /* bytes, the empty line included */
    int status;   /* of a response; 0 of a request */
    bool chunked, has_length, close, expects_continue;
    uint64_t length;
};

enum outcome { MALFORMED = -1, INCOMPLETE = 0, COMPLETE = 1 };

enum outcome head_parse(struct head *head, const char *data, size_t size);

/* A body that arrives in pieces of any size. */
struct body {
    enum {
        BY_LENGTH,  /* `left` bytes are missing */
        UNTIL_CLOSE,
        CHUNK_SIZE,
        CHUNK_EXTENSION,
        CHUNK_DATA,
        CHUNK_END,
        TRAILER_START,
        TRAILER,
    } part;
    uint64_t left;
    bool has_digit;
};

typedef void body_sink(void *owner, const char *data, size_t size);

/* Without framing headers a request has no body, and a response ends with its connection. */
void body_start(struct body *body, const struct head *head);

/* Hands the payload in `data` to `sink`, without framing. *used: how much belonged to the body. */
enum outcome body_feed(struct body *body, const char *data, size_t size, size_t *used,
                       body_sink *sink, void *owner);

#endif
