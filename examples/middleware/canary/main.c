/* Gives workers whose address has the configured text in it (config: "canary") one request in ten, others the rest.
 *
 * Without libraries: the types below are those of branchline:middleware in the component model's own layout.
 */
#include <stdint.h>

typedef struct { const char *at; uint32_t length; } text;
typedef struct { text id, url; void *labels; uint32_t label_count; uint64_t running, queued, cached; } candidate;
typedef struct { text id; double weight; } weight;
typedef struct { uint32_t action; weight *weights; uint32_t count; } answer;

static uint8_t heap[1 << 20];
static uint32_t used;

__attribute__((export_name("cabi_realloc"))) void *cabi_realloc(void *old, uint32_t old_size, uint32_t align,
                                                                uint32_t size) {
  used = (used + align - 1) & ~(align - 1);
  if (size > sizeof heap - used) __builtin_trap();
  uint8_t *fresh = heap + used;
  used += size;
  for (uint32_t i = 0; i < old_size && i < size; i++) fresh[i] = ((uint8_t *)old)[i];
  return fresh;
}

__attribute__((import_module("branchline:middleware/host@1.0.0"), import_name("config"))) void host_config(text *out);

static int contains(text whole, text part) {
  if (part.length == 0) return 0;
  for (uint32_t start = 0; start + part.length <= whole.length; start++) {
    uint32_t i = 0;
    while (i < part.length && whole.at[start + i] == part.at[i]) i++;
    if (i == part.length) return 1;
  }
  return 0;
}

__attribute__((export_name("branchline:middleware/on-route@1.0.0#handle"))) answer *handle(
    const char *id, uint32_t id_length, uint32_t has_model, const char *model, uint32_t model_length,
    uint32_t has_tenant, const char *tenant, uint32_t tenant_length, uint64_t prompt_tokens, candidate *candidates,
    uint32_t count) {
  static answer result;
  text wanted;
  host_config(&wanted);
  /* The configuration is JSON: a string without its quotes. */
  if (wanted.length >= 2) { wanted.at++; wanted.length -= 2; }
  weight *weights = cabi_realloc(0, 0, 8, count * sizeof(weight));
  uint32_t canaries = 0;
  for (uint32_t i = 0; i < count; i++) canaries += contains(candidates[i].url, wanted);
  if (canaries == 0 || canaries == count) { result.action = 0; return &result; }
  for (uint32_t i = 0; i < count; i++) {
    weights[i].id = candidates[i].id;
    weights[i].weight = contains(candidates[i].url, wanted) ? 0.1 / canaries : 0.9 / (count - canaries);
  }
  result.action = 2;
  result.weights = weights;
  result.count = count;
  return &result;
}
