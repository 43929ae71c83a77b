/* `k3decode info SNAPSHOT.h5`: a page about a snapshot. Layer: commands. */
#include "commands/info_snapshot.h"

#include <stdio.h>

#include "store/snapshot_file.h"

static int64_t part_bytes(const K3SnapshotInfo *info, K3StatePart part)
{
  uint64_t shape[4];
  int axes = k3_state_shape(info, part, shape);
  int64_t bytes = part == K3_STATE_CACHE ? k3_snapshot_cache_bytes(info->cache_type) : 4;
  for (int i = 0; i < axes; i++) bytes *= (int64_t)shape[i];
  return bytes;
}

K3Status k3_info_snapshot(const char *path)
{
  K3Snapshot *snapshot;
  uint64_t sum;
  K3_TRY(k3_snapshot_sum(path, 0, 1, &sum));
  K3_TRY(k3_snapshot_open(path, sum, &snapshot));
  const K3SnapshotInfo *info = k3_snapshot_info(snapshot);
  const K3Config *c = &info->config;
  printf("snapshot         %s (whole: digest %016llx)\n", path, (unsigned long long)sum);
  printf("model            %s (digest %016llx)\n", info->model, (unsigned long long)info->model_digest);
  printf("                 %lld layers (%lld KDA, %lld MLA), hidden %lld, vocabulary %lld, %lld heads, %lld experts\n",
         (long long)c->num_layers, (long long)k3_config_count_layers(c, K3_LAYER_KDA),
         (long long)k3_config_count_layers(c, K3_LAYER_MLA), (long long)c->hidden_size, (long long)c->vocab_size,
         (long long)c->num_heads, (long long)c->num_experts);
  printf("written          %s by k3decode %s, %lld ranks, backend %s, %s activations\n", info->time,
         info->program_version, (long long)info->ranks, info->backend, info->activations);
  printf("position         %lld", (long long)k3_snapshot_position(info));
  if (info->first_context) printf(" (%lld synthetic + %lld fed)", (long long)info->first_context, (long long)info->fed);
  printf("\n");
  printf("tokens           %lld: %lld given, %lld decoded; %lld still to feed\n", (long long)info->token_count,
         (long long)info->prompt_count, (long long)(info->token_count - info->prompt_count),
         (long long)(info->token_count - info->fed));
  printf("state            cache %.3f MB (%s), KDA states %.3f MB, convolution windows %.3f MB\n",
         1e-6 * (double)part_bytes(info, K3_STATE_CACHE), info->cache_type,
         1e-6 * (double)part_bytes(info, K3_STATE_KDA), 1e-6 * (double)part_bytes(info, K3_STATE_CONV));
  k3_snapshot_close(snapshot);
  return K3_OK;
}
