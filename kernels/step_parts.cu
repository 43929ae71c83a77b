/* Collectives and products as the sublayers of a step use them. See step.h. Layer: backend (CUDA), host code only. */
#include "kernels/step.h"

/* --- collectives --------------------------------------------------------------------------------------------- */

K3Status k3_step_reduce(K3Cuda *cuda, float *data, int64_t count)
{
  if (!cuda->communicates) return K3_OK;
  K3_TRY(k3_cuda_mark(cuda, K3_PHASE_COMM, 0));
  K3_TRY(cuda->collectives.all_reduce(cuda, data, count));
  return k3_cuda_mark(cuda, cuda->phase, 0);
}

K3Status k3_step_gather(K3Cuda *cuda, int buffers, const void *const *own, void *const *data, const K3Pieces *pieces,
                        int64_t size)
{
  if (!cuda->communicates) return K3_OK;
  K3_TRY(k3_cuda_mark(cuda, K3_PHASE_COMM, 0));
  K3_TRY(cuda->collectives.all_gather(cuda, buffers, own, data, pieces, size));
  return k3_cuda_mark(cuda, cuda->phase, 0);
}

K3Pieces k3_step_share_pieces(K3Cuda *cuda, int slot, K3Share share, int64_t width)
{
  int64_t *count = cuda->piece + 2 * slot * cuda->world, *displacement = count + cuda->world;
  for (int r = 0; r < cuda->world; r++) {
    K3Range range = k3_plan_range(cuda->plan, r, share);
    count[r] = (range.end - range.begin) * width;
    displacement[r] = range.begin * width;
  }
  K3Pieces pieces;
  pieces.count = count;
  pieces.displacement = displacement;
  return pieces;
}

K3Pieces k3_step_equal_pieces(K3Cuda *cuda, int slot, int64_t each)
{
  int64_t *count = cuda->piece + 2 * slot * cuda->world, *displacement = count + cuda->world;
  for (int r = 0; r < cuda->world; r++) {
    count[r] = each;
    displacement[r] = r * each;
  }
  K3Pieces pieces;
  pieces.count = count;
  pieces.displacement = displacement;
  return pieces;
}

/* --- products ------------------------------------------------------------------------------------------------- */

static K3CudaInput input_of(K3CudaInputKind kind, K3CudaVector vector, int64_t n)
{
  K3CudaInput input;
  memset(&input, 0, sizeof input);
  input.kind = kind;
  input.vector = vector;
  input.n = n;
  return input;
}

K3CudaInput k3_step_values(const float *values, int64_t n)
{
  K3CudaVector vector;
  memset(&vector, 0, sizeof vector);
  vector.values = (float *)values;
  return input_of(K3_INPUT_VALUES, vector, n);
}

K3CudaInput k3_step_vector(K3CudaVector vector, int64_t n)
{
  return input_of(vector.codes ? K3_INPUT_QUANTISED : K3_INPUT_VALUES, vector, n);
}

K3CudaInput k3_step_situ(const K3Cuda *cuda, const float *gate, const float *up, int64_t n)
{
  K3CudaInput input = k3_step_values(gate, n);
  input.kind = K3_INPUT_SITU;
  input.up = up;
  input.situ_beta = (float)cuda->config->situ_beta;
  input.situ_linear_beta = (float)cuda->config->situ_linear_beta;
  return input;
}

K3CudaInput k3_step_rms(const float *values, const float *norm, double eps, int64_t full, int64_t offset, int64_t n)
{
  K3CudaInput input = k3_step_values(values, n);
  input.kind = K3_INPUT_RMS;
  input.norm = norm;
  input.eps = (float)eps;
  input.full = full;
  input.offset = offset;
  return input;
}

static void add_item(K3CudaLinear *linear, const K3CudaMatrix *matrix, float *y, int add)
{
  if (matrix->rows == 0) return; /* this rank has none of it */
  K3CudaLinearItem *item = &linear->items[linear->count++];
  item->matrix = *matrix;
  item->y = y;
  item->add = add;
}

static void add_group(K3CudaLinear *linear, const K3CudaGroup *group, float *y)
{
  for (int k = 0; k < group->count; k++) add_item(linear, &group->matrix[k], y + group->offset[k], 0);
}

static K3CudaLinear products(const K3Cuda *cuda, K3CudaInput input)
{
  K3CudaLinear linear;
  memset(&linear, 0, sizeof linear);
  linear.input = input;
  linear.exact = cuda->exact;
  return linear;
}

static K3Status multiply_all(K3Cuda *cuda, const K3CudaLinear *linear)
{
  if (linear->count == 0) return K3_OK;
  cuda->phase_bytes[cuda->phase] += k3_cuda_linear_bytes(linear);
  return k3_cuda_linear(&cuda->launch, linear);
}

K3Status k3_step_multiply_group(K3Cuda *cuda, const K3CudaGroup *group, K3CudaInput input, float *y)
{
  K3CudaLinear linear = products(cuda, input);
  add_group(&linear, group, y);
  return multiply_all(cuda, &linear);
}

K3Status k3_step_multiply(K3Cuda *cuda, int64_t layer, K3Role role, K3CudaInput input, float *y, int add)
{
  const K3CudaMatrix *matrix = &k3_cuda_tensor(cuda, layer, role)->matrix;
  K3CudaLinear linear = products(cuda, input);
  add_item(&linear, matrix, y, add);
  if (linear.count > 0) return multiply_all(cuda, &linear);
  const K3TensorTable *table = &cuda->source->table;
  return add ? K3_OK
             : k3_cuda_fill(&cuda->launch, y, table->specs[k3_tensors_find(table, layer, role)].shape[0], 0.0f, 0.0f);
}
