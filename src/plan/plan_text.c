/* See plan_text.h. Layer: plan (pure). */
#include "plan/plan_text.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct {
  char *text;
  size_t size, used;
} Page;

static void add(Page *page, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(Page *page, const char *format, ...)
{
  if (page->used >= page->size) return;
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(page->text + page->used, page->size - page->used, format, arguments);
  va_end(arguments);
  if (length > 0) page->used += (size_t)length;
}

/* Smallest and largest part of a share over the ranks. */
static void add_share(Page *page, const K3Plan *plan, const char *what, K3Share share)
{
  int64_t least = INT64_MAX, most = 0;
  for (int r = 0; r < plan->world; r++) {
    K3Range range = k3_plan_range(plan, r, share);
    int64_t count = range.end - range.begin;
    if (count < least) least = count;
    if (count > most) most = count;
  }
  add(page, "%-22s %lld in units of %lld: ", what, (long long)plan->total[share], (long long)plan->unit_size[share]);
  if (least == most)
    add(page, "%lld a rank\n", (long long)most);
  else
    add(page, "%lld to %lld a rank\n", (long long)least, (long long)most);
}

void k3_plan_describe(const K3Plan *plan, const K3Config *config, const K3TensorTable *table, const K3Type *types,
                      char *text, size_t size)
{
  Page page = {text, size, 0};
  if (size) text[0] = '\0';
  int64_t least = INT64_MAX, most = 0;
  for (int r = 0; r < plan->world; r++) {
    int64_t bytes = k3_plan_weight_bytes(plan, r, table, types);
    if (bytes < least) least = bytes;
    if (bytes > most) most = bytes;
  }
  add(&page, "ranks                  %d\n", plan->world);
  add(&page, "weights                %.3f to %.3f GB a rank\n", (double)least * 1e-9, (double)most * 1e-9);
  add_share(&page, plan, "vocabulary rows", K3_SHARE_VOCAB);
  if (k3_config_count_layers(config, K3_LAYER_KDA)) add_share(&page, plan, "KDA heads", K3_SHARE_KDA_HEADS);
  if (k3_config_count_layers(config, K3_LAYER_MLA)) add_share(&page, plan, "MLA heads", K3_SHARE_MLA_HEADS);
  if (config->first_dense_layers > 0) add_share(&page, plan, "dense intermediate", K3_SHARE_DENSE);
  if (config->first_dense_layers < config->num_layers) {
    add_share(&page, plan, "shared intermediate", K3_SHARE_SHARED);
    add_share(&page, plan, "latent rows", K3_SHARE_LATENT_ROWS);
    add_share(&page, plan, "latent columns", K3_SHARE_LATENT_COLUMNS);
    add_share(&page, plan, "router rows", K3_SHARE_ROUTER_ROWS);
    add(&page, "expert grid            %d groups x %d bands; intermediate %lld in units of %lld; busiest rank expected at %.2f of the mean\n",
        plan->expert_groups, plan->expert_bands, (long long)plan->total[K3_SHARE_EXPERTS],
        (long long)plan->unit_size[K3_SHARE_EXPERTS], plan->expert_load);
  }
  if (plan->cache_band == K3_CACHE_CONTEXT)
    add(&page, "MLA cache              by context: pages of %lld positions dealt round-robin\n",
        (long long)plan->page_positions);
  else
    add(&page, "MLA cache              not banded: every rank holds all positions\n");
}
