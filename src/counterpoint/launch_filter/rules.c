// The table of rules in force, and the match of patterns with kernel names.
//
// Python swaps tables while launches continue. So the filter copies a table out of the control block, and uses it only if it is
// complete. All of this happens under the mutex.
#define _GNU_SOURCE
#include "filter.h"

#define MAX_HOLD_US 1000.0  // as rules.py has it
#define CRC_POLYNOMIAL 0xEDB88320U  // of CRC-32 as zlib has it, bits reversed

HIDDEN struct slot_record rules_now;

HIDDEN void forget_rules(void) {
    rules_now.generation = 0;
    rules_now.num_rules = 0;
}

static uint32_t crc32(uint32_t crc, const void *bytes, size_t size) {
    crc = ~crc;
    for (const unsigned char *byte = bytes; size--; byte++) {
        crc ^= *byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? CRC_POLYNOMIAL : 0);
    }
    return ~crc;
}

// Copies memory that Python may be writing. A torn copy fails the checksum.
static void copy_shared(void *to, const void *from, size_t size) {
    uint64_t *target = to;
    const uint64_t *source = from;
    for (size_t i = 0; i < (size + 7) / 8; i++) target[i] = LOAD(&source[i]);
}

static bool is_rule_sound(const struct slot_record *table, const struct rule_record *rule) {
    const bool has_pattern = (uint64_t)rule->pattern_offset + rule->pattern_bytes <= table->pool_bytes;
    return has_pattern && rule->dynamic_shared_bytes <= INT32_MAX && rule->hold_us >= 0 && rule->hold_us <= MAX_HOLD_US;
}

// Returns whether a copy of a table is what Python wrote. Every figure that is used later is checked here, once.
static bool is_table_whole(const struct slot_record *table) {
    if (table->num_rules > MAX_RULES || table->pool_bytes > PATTERN_POOL_BYTES) return false;
    for (uint32_t i = 0; i < table->num_rules; i++)
        if (!is_rule_sound(table, &table->rules[i])) return false;
    const uint32_t crc = crc32(0, table->rules, table->num_rules * sizeof *table->rules);
    return crc32(crc, table->pool, table->pool_bytes) == table->checksum;
}

// Copies the table if there is a new one. If Python is still writing it, the next launch tries again.
HIDDEN void refresh_rules(struct block_record *block) {
    static struct slot_record fresh;
    const uint64_t generation = LOAD(&block->generation);
    if (generation == rules_now.generation) return;
    const struct slot_record *slot = &block->slots[generation % NUM_SLOTS];
    copy_shared(&fresh, slot, offsetof(struct slot_record, rules));
    if (fresh.generation != generation || fresh.num_rules > MAX_RULES || fresh.pool_bytes > PATTERN_POOL_BYTES) return;
    copy_shared(fresh.rules, slot->rules, fresh.num_rules * sizeof *fresh.rules);
    copy_shared(fresh.pool, slot->pool, fresh.pool_bytes);
    if (!is_table_whole(&fresh)) return;
    rules_now = fresh;
}

// Matches a shell pattern of * and ? with a whole name. A backslash makes the next letter literal.
HIDDEN bool matches(const char *pattern, size_t pattern_bytes, const char *name) {
    const char *end = pattern + pattern_bytes, *star = NULL, *retry = NULL;
    while (*name) {
        if (pattern < end && *pattern == '*') {
            star = ++pattern;
            retry = name;
            continue;
        }
        const bool is_literal = pattern + 1 < end && *pattern == '\\';
        const char *letter = is_literal ? pattern + 1 : pattern;
        if (letter < end && (*letter == *name || (!is_literal && *letter == '?'))) {
            pattern = letter + 1;
            name++;
        } else if (star) {  // the last star matches one more letter
            pattern = star;
            name = ++retry;
        } else {
            return false;
        }
    }
    while (pattern < end && *pattern == '*') pattern++;
    return pattern == end;
}
