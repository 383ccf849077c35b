#define _GNU_SOURCE
#include "http.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define HEAD_LIMIT 65536
#define CHUNK_LIMIT (UINT64_C(1) << 40)

static bool is(const char *text, size_t size, const char *word) {
    return size == strlen(word) && strncasecmp(text, word, size) == 0;
}

/* Values are lists, and tokens in them have any case: "Keep-Alive, Close". */
static bool mentions(const char *value, size_t size, const char *word) {
    size_t length = strlen(word);
    for (size_t at = 0; at + length <= size; at++)
        if (strncasecmp(value + at, word, length) == 0) return true;
    return false;
}

static enum outcome read_header(struct head *head, const char *line, size_t size) {
    const char *colon = memchr(line, ':', size);
    if (!colon || colon == line) return MALFORMED;
    size_t name = (size_t)(colon - line);
    const char *value = colon + 1, *end = line + size;
    while (value < end && (*value == ' ' || *value == '\t')) value++;
    size_t length = (size_t)(end - value);
    if (is(line, name, "content-length")) {
        if (!length || !isdigit((unsigned char)*value)) return MALFORMED;
        head->has_length = true;
        head->length = strtoull(value, NULL, 10);
    } else if (is(line, name, "transfer-encoding")) {
        head->chunked = mentions(value, length, "chunked");
    } else if (is(line, name, "connection")) {
        head->close = mentions(value, length, "close");
    } else if (is(line, name, "expect")) {
        head->expects_continue = mentions(value, length, "100-continue");
    }
    return COMPLETE;
}

enum outcome head_parse(struct head *head, const char *data, size_t size) {
    const char *end = memmem(data, size, "\r\n\r\n", 4);
    if (!end) return size > HEAD_LIMIT ? MALFORMED : INCOMPLETE;
    *head = (struct head){.size = (size_t)(end - data) + 4};
    const char *line = memmem(data, head->size, "\r\n", 2);
    if (strncmp(data, "HTTP/1.", 7) == 0) {
        head->status = atoi(data + 9);
        head->close = data[7] == '0';
        if (head->status < 100) return MALFORMED;
    } else if (!memmem(data, (size_t)(line - data), " HTTP/1.", 8)) {
        return MALFORMED;
    }
    while (line < end) {
        line += 2;
        const char *next = memmem(line, (size_t)(end + 2 - line), "\r\n", 2);
        if (read_header(head, line, (size_t)(next - line)) == MALFORMED) return MALFORMED;
        line = next;
    }
    return COMPLETE;
}

void body_start(struct body *body, const struct head *head) {
    *body = (struct body){.part = BY_LENGTH, .left = head->length};
    if (head->chunked) *body = (struct body){.part = CHUNK_SIZE};
    else if (head->status && !head->has_length) body->part = UNTIL_CLOSE;
}

/* One byte of what frames the chunks. COMPLETE after the last byte of the body. */
static enum outcome feed_framing(struct body *body, char byte) {
    switch (body->part) {
        case CHUNK_SIZE:
            if (isxdigit((unsigned char)byte)) {
                int digit = isdigit((unsigned char)byte) ? byte - '0' : (byte | 32) - 'a' + 10;
                body->left = body->left * 16 + (uint64_t)digit;
                body->has_digit = true;
                return body->left < CHUNK_LIMIT ? INCOMPLETE : MALFORMED;
            }
            if (!body->has_digit) return MALFORMED;
            body->part = CHUNK_EXTENSION;
            /* fall through */
        case CHUNK_EXTENSION:
            if (byte == '\n') body->part = body->left ? CHUNK_DATA : TRAILER_START;
            return INCOMPLETE;
        case CHUNK_END:
            if (byte == '\n') *body = (struct body){.part = CHUNK_SIZE};
            else if (byte != '\r') return MALFORMED;
            return INCOMPLETE;
        case TRAILER_START:
            if (byte == '\n') return COMPLETE;
            if (byte != '\r') body->part = TRAILER;
            return INCOMPLETE;
        default: /* TRAILER */
            if (byte == '\n') body->part = TRAILER_START;
            return INCOMPLETE;
    }
}

enum outcome body_feed(struct body *body, const char *data, size_t size, size_t *used,
                       body_sink *sink, void *owner) {
    size_t at = 0;
    enum outcome outcome = INCOMPLETE;
    if (body->part == BY_LENGTH && !body->left) outcome = COMPLETE;
    while (at < size && outcome == INCOMPLETE) {
        if (body->part > CHUNK_DATA || body->part == CHUNK_SIZE || body->part == CHUNK_EXTENSION) {
            outcome = feed_framing(body, data[at++]);
            continue;
        }
        size_t piece = size - at;
        if (body->part != UNTIL_CLOSE && piece > body->left) piece = (size_t)body->left;
        sink(owner, data + at, piece);
        at += piece;
        if (body->part == UNTIL_CLOSE) continue;
        body->left -= piece;
        if (body->left) continue;
        if (body->part == CHUNK_DATA) body->part = CHUNK_END;
        else outcome = COMPLETE;
    }
    *used = at;
    return outcome;
}
