/* The feed-forward sublayers: dense, and mixture of experts. See step.h. Layer: backend (CUDA), host code only.
 * Follows feed_dense and feed_moe of src/host/host_step.c. */
#include "kernels/experts.h"
#include "kernels/step.h"

K3Status k3_step_feed_dense(K3Cuda *cuda, int64_t i, K3CudaVector x)
{
  int64_t own = k3_cuda_own(cuda, K3_SHARE_DENSE);
  K3_TRY(k3_step_multiply_group(cuda, &cuda->layers[i].ffn, k3_step_vector(x, cuda->config->hidden_size), cuda->ffn_y));
  return k3_step_multiply(cuda, i, K3_ROLE_DOWN_PROJ, k3_step_situ(cuda, cuda->ffn_y, cuda->ffn_y + own, own),
                          cuda->branch, 0);
}

/* Latent, router scores, and the shared experts' gate and up, in one launch; then latent and scores of all ranks. */
static K3Status project_latent(K3Cuda *cuda, int64_t i, K3CudaVector x)
{
  K3_TRY(k3_step_multiply_group(cuda, &cuda->layers[i].ffn, k3_step_vector(x, cuda->config->hidden_size), cuda->ffn_y));
  const void *const own[2] = {cuda->ffn_y, cuda->ffn_y + k3_cuda_own(cuda, K3_SHARE_LATENT_ROWS)};
  void *const data[2] = {cuda->latent, cuda->logits_router};
  const K3Pieces pieces[2] = {k3_step_share_pieces(cuda, 0, K3_SHARE_LATENT_ROWS, 1),
                              k3_step_share_pieces(cuda, 1, K3_SHARE_ROUTER_ROWS, 1)};
  return k3_step_gather(cuda, 2, own, data, pieces, 4);
}

static const float *shared_gate(const K3Cuda *cuda)
{
  return cuda->ffn_y + k3_cuda_own(cuda, K3_SHARE_LATENT_ROWS) + k3_cuda_own(cuda, K3_SHARE_ROUTER_ROWS);
}

static K3CudaRouting routing_of(const K3Cuda *cuda, int64_t i)
{
  K3CudaRouting routing;
  memset(&routing, 0, sizeof routing);
  routing.experts = (int)cuda->config->num_experts;
  routing.chosen = (int)cuda->config->num_experts_per_token;
  routing.logits = cuda->logits_router;
  routing.bias = k3_cuda_tensor(cuda, i, K3_ROLE_ROUTER_BIAS)->vector;
  routing.scaling = (float)cuda->config->routed_scaling_factor;
  routing.renormalize = cuda->config->renormalize;
  return routing;
}

/* What the chosen experts of this rank read of a matrix of all its experts, on average. */
static int64_t chosen_bytes(const K3Cuda *cuda, const K3CudaMatrix *matrix)
{
  return k3_cuda_matrix_read_bytes(matrix, matrix->rows) / cuda->config->num_experts *
         cuda->config->num_experts_per_token;
}

/* Routing, z = Σ w_e Down_e hidden_e of this rank's experts, and the shared experts' down into `branch`. */
static K3Status experts(K3Cuda *cuda, int64_t i, K3Range group, int64_t band)
{
  const K3Config *c = cuda->config;
  int64_t shared = k3_cuda_own(cuda, K3_SHARE_SHARED);
  K3CudaExperts a;
  memset(&a, 0, sizeof a);
  a.y = k3_step_values(cuda->latent, c->latent_size);
  a.gate = k3_cuda_tensor(cuda, i, K3_ROLE_EXPERTS_GATE)->matrix;
  a.up = k3_cuda_tensor(cuda, i, K3_ROLE_EXPERTS_UP)->matrix;
  a.down = k3_cuda_tensor(cuda, i, K3_ROLE_EXPERTS_DOWN)->matrix;
  a.first = group.begin;
  a.local = group.end - group.begin;
  a.band = band;
  a.routing = routing_of(cuda, i);
  a.ids = cuda->ids;
  a.weights = cuda->chosen_weights;
  a.hidden = cuda->hidden;
  a.z = cuda->z;
  a.meeting = cuda->meeting;
  a.situ_beta = (float)c->situ_beta;
  a.situ_linear_beta = (float)c->situ_linear_beta;
  a.exact = cuda->exact;
  cuda->phase_bytes[cuda->phase] += chosen_bytes(cuda, &a.gate) + chosen_bytes(cuda, &a.up) + chosen_bytes(cuda, &a.down);
  if (shared > 0) {
    a.shared.matrix = k3_cuda_tensor(cuda, i, K3_ROLE_SHARED_DOWN_PROJ)->matrix;
    a.shared.y = cuda->branch;
    a.shared_input = k3_step_situ(cuda, shared_gate(cuda), shared_gate(cuda) + shared, shared);
    cuda->phase_bytes[cuda->phase] += k3_cuda_matrix_read_bytes(&a.shared.matrix, a.shared.matrix.rows);
  }
  return k3_cuda_experts(&cuda->launch, &a);
}

K3Status k3_step_feed_moe(K3Cuda *cuda, int64_t i, K3CudaVector x)
{
  const K3Config *c = cuda->config;
  K3Range group = k3_plan_experts(cuda->plan, cuda->rank);
  K3Range columns = k3_plan_range(cuda->plan, cuda->rank, K3_SHARE_LATENT_COLUMNS);
  int64_t band = k3_cuda_own(cuda, K3_SHARE_EXPERTS), shared = k3_cuda_own(cuda, K3_SHARE_SHARED);
  K3_TRY(project_latent(cuda, i, x));
  if (band > 0 && group.end > group.begin) {
    K3_TRY(experts(cuda, i, group, band));
  } else { /* more ranks than bands: this one has no experts */
    K3_TRY(k3_cuda_fill(&cuda->launch, cuda->z, c->latent_size, 0.0f, 0.0f));
    if (shared > 0)
      K3_TRY(k3_step_multiply(cuda, i, K3_ROLE_SHARED_DOWN_PROJ,
                              k3_step_situ(cuda, shared_gate(cuda), shared_gate(cuda) + shared, shared), cuda->branch,
                              0));
  }
  K3_TRY(k3_step_reduce(cuda, cuda->z, c->latent_size));
  return k3_step_multiply(cuda, i, K3_ROLE_ROUTED_UP_PROJ,
                          k3_step_rms(cuda->z, k3_cuda_tensor(cuda, i, K3_ROLE_ROUTED_NORM)->vector, c->rms_norm_eps,
                                      c->latent_size, columns.begin, columns.end - columns.begin),
                          cuda->branch, shared > 0);
}
