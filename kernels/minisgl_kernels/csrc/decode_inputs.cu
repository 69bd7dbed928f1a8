// The inputs of a decode step from the tables on the device. One thread a request.
#include "common.cuh"

using namespace minisgl;

namespace {

constexpr int kThreads = 128;

template <class Index>
__global__ void decode_inputs(Index* input_ids, Index* positions, Index* out_loc, const Index* rows,
                              const int* lens, const int* page_table, const int* token_pool,
                              int64_t width, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  wait_for_previous();
  launch_next();
  if (i >= count) return;
  const int64_t position = lens[i] - 1;
  const int64_t place = static_cast<int64_t>(rows[i]) * width + position;
  input_ids[i] = token_pool[place];
  positions[i] = static_cast<Index>(position);
  out_loc[i] = page_table[place];
}

template <class Index>
int run(Args args) {
  const int64_t count = args.size(0, 0);
  return launch(decode_inputs<Index>, (count + kThreads - 1) / kThreads, kThreads, 0, args.stream(),
                args.data<Index>(0), args.data<Index>(1), args.data<Index>(2),
                args.data<const Index>(3), args.data<const int>(4), args.data<const int>(5),
                args.data<const int>(6), args.stride(5, 0), count);
}

}  // namespace

// (input_ids [B], positions [B], out_loc [B], rows [B], lens [B] int32, page_table [rows, W] int32,
//  token_pool [rows, W] int32); the first four int32, or all int64
EXPORT(decode_inputs) { return args.wide(0) ? run<int64_t>(args) : run<int32_t>(args); }
