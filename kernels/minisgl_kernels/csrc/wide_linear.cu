// Some tokens times a weight matrix: out[M, N] = x[M, K] W[N, K]^T for M up to 256, on Hopper.
//
// The rows of W are the 64 rows of a warpgroup's product and the tokens its columns, so that hardly
// a tensor core works on padding. A block has 64 GROUPS rows and up to TOKENS tokens. SPLIT blocks, a
// cluster, share the K dimension, so that enough multiprocessors have work. Within a block, WAYS
// warpgroups take turns with the same rows: the products of few tokens are short, and each waits for
// the one before. One thread has tiles of 64 k of W and of x copied to shared memory, swizzled, some
// stages ahead. At the end each block adds up, in the order of the blocks, what those that share its
// K dimension have of its part of the tokens.
//
// W does not depend on the kernel before: all stages' weights are on their way before the block
// waits for it.
//
// MODE 0 stores (with bias, if any); 1 adds to out in place (a residual); 2 stores silu(gate) * up,
// where W holds N / 2 rows of gate and then those of up. `squares` [M, parts]: sums of squares of
// x's rows; the result is multiplied by their inverse root mean square, as a norm would do with x.
// MODE 1 leaves as much behind for the next product: `scaled` = out * next_norm, and the squares of
// out by blocks of rows [M, N / (64 GROUPS)].
//
// MODE 3 is a QKV product with what comes before attention: a block's rows are one head. Queries and
// keys are normalised (with weights), turned by their positions, and stored: queries to out, keys
// and values to their slots.
#include "hopper.cuh"

using namespace minisgl;

namespace {

using T = __nv_bfloat16;

// Macros: TOKENS (a multiple of 8 to 256; of MODE 3 to 128), GROUPS, WAYS, SPLIT, MODE.
constexpr int kRows = 64 * GROUPS;
constexpr int kOutputs = MODE == 2 ? kRows / 2 : kRows;  // of a block, for each token
constexpr int kPitch = kRows + 4;  // of sums: a token further on is 4 banks further on, modulo 16
constexpr int kWarps = 4 * GROUPS * WAYS;  // that multiply; one more copies
constexpr int kThreads = 32 * kWarps + 32;
constexpr int kRowBytes = kChunk * 2;
constexpr int kStageBytes = (kRows + TOKENS) * kRowBytes;
constexpr int kSums = TOKENS * kPitch;
constexpr int kSumBytes = WAYS * kSums * 4;
constexpr int kMaxStages = 16;
// At the end a thread has four outputs of a token at a time, always of the same rows.
constexpr int kPieces = kOutputs / 4;
constexpr int kPass = kThreads / kPieces;              // tokens that the block has at a time
constexpr int kMine = (TOKENS + SPLIT - 1) / SPLIT;    // the most that it has in all
constexpr int kTurns = (kMine + kPass - 1) / kPass;
constexpr int kRoom = TOKENS > 176 ? 2 : 6;  // registers beside the accumulators
constexpr int kEarly = kTurns < kRoom ? kTurns : kRoom;  // whose residuals are loaded ahead
constexpr int kTerms = SPLIT * WAYS, kTotals = MODE == 2 ? 2 : 1;
constexpr int kFit = 12 / (kTerms * kTotals);          // turns whose terms registers can hold
constexpr int kBatch = kFit < 1 ? 1 : kFit < kTurns ? kFit : kTurns;
constexpr int kScales = MODE == 3 ? 2 : 1;  // arrays of 256 numbers: scales and slots
constexpr int kTail = kScales * 256 * 4 + 2 * kMaxStages * 8;  // and barriers

struct Arguments {
  T* out;
  const T* bias;
  const float* squares;
  const T* next_norm;
  T* scaled;
  float* next_squares;
  float eps;
  int tokens, token_tiles, rows, k, stages, parts;
};

struct Turn {  // of MODE 3
  const int* positions;
  const int* out_loc;
  const float* cos_sin;  // [positions, kRows]: cosines of the pairs i and i + kRows / 2, then sines
  const T* q_weight;
  const T* k_weight;
  float eps;
  T* k_slots;
  T* v_slots;
  int64_t slot_step;
  int q_heads, kv_heads;
};

using Two = Vec<T, 2>;

// silu(gate) * up, in a few instructions without a branch.
__device__ inline float gated(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

__device__ inline float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__global__ void __launch_bounds__(kThreads)
    wide_linear(const __grid_constant__ CUtensorMap weight_map,
                const __grid_constant__ CUtensorMap token_map, const Arguments of, const Turn turn_by) {
  DYNAMIC_SHARED(char, memory);
  const uint32_t start = (shared_address(memory) + 1023) / 1024 * 1024;
  char* const ring = memory + (start - shared_address(memory));
  const int ring_bytes = of.stages * kStageBytes > kSumBytes ? of.stages * kStageBytes : kSumBytes;
  float* const scales = reinterpret_cast<float*>(ring + ring_bytes);
  int* const slots = reinterpret_cast<int*>(scales + 256);
  const uint32_t full = start + ring_bytes + kScales * 256 * 4, empty = full + kMaxStages * 8;

  launch_next();  // with its weights under way it waits for this one, and this one for all before
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, cluster = blockIdx.x / SPLIT;
  const int tile = cluster / of.token_tiles;
  const int first_token = cluster % of.token_tiles * TOKENS;
  const int tokens = of.tokens - first_token < TOKENS ? of.tokens - first_token : TOKENS;
  const int chunks = of.k / kChunk;
  const int first = chunks * rank / SPLIT, count = chunks * (rank + 1) / SPLIT - first;
  const int half = of.rows / 2;
  const int mine = (tokens - rank + SPLIT - 1) / SPLIT;  // tokens rank, rank + SPLIT, ...

  auto copy_weights = [&](int i, int stage) {
    const uint32_t to = start + stage * kStageBytes, barrier = full + stage * 8;
    arrive_expecting(barrier, kStageBytes);
    if (MODE == 2) {
      copy_tile(to, &weight_map, tile * kOutputs, (first + i) * kChunk, barrier);
      copy_tile(to + kOutputs * kRowBytes, &weight_map, half + tile * kOutputs,
                (first + i) * kChunk, barrier);
    } else {
      copy_tile(to, &weight_map, tile * kOutputs, (first + i) * kChunk, barrier);
    }
  };
  auto copy_tokens = [&](int i, int stage) {
    copy_tile_kept(start + stage * kStageBytes + kRows * kRowBytes, &token_map, first_token,
                   (first + i) * kChunk, full + stage * 8);
  };

  const int ahead = count < of.stages ? count : of.stages;
  const bool copies = warp == kWarps && lane == 0;
  if (copies) {
    prefetch_map(&weight_map);
    prefetch_map(&token_map);
    for (int i = 0; i < of.stages; ++i) {
      make_barrier(full + i * 8, 1);
      make_barrier(empty + i * 8, 4 * GROUPS);
    }
    publish_barriers();
    for (int i = 0; i < ahead; ++i) copy_weights(i, i);
  }
  __syncthreads();
  wait_for_previous();

  // What the end needs beside the sums is loaded before them.
  using Four = Vec<T, 4>;
  const int stored = MODE == 2 ? half : of.rows;
  const int piece = threadIdx.x % kPieces, slot = threadIdx.x / kPieces;
  const int row = tile * kOutputs + piece * 4;
  auto valid = [&](int turn) {
    return slot < kPass && row < stored && slot + turn * kPass < mine;
  };
  auto place = [&](int turn) {
    const int64_t token = first_token + rank + (slot + turn * kPass) * SPLIT;
    return token * stored + row;
  };
  Four bias = {}, weights = {}, before[kEarly] = {};
  // Of MODE 3 a thread has two neighbouring rows of a head, and the two that are turned with them:
  // two cosines and two sines.
  auto load_pairs = [](const T* from) {
    const Two first = Two::load(from), second = Two::load(from + kRows / 2);
    return Four{{first.of[0], first.of[1], second.of[0], second.of[1]}};
  };
  float4 angles[MODE == 3 ? kTurns : 1];
  const bool is_query = MODE == 3 && tile < turn_by.q_heads;
  const bool is_value = MODE == 3 && tile >= turn_by.q_heads + turn_by.kv_heads;
  auto load_early = [&]() {
    if (slot < kPass && row < stored) {
      if (MODE == 3 && of.bias != nullptr) bias = load_pairs(of.bias + tile * kRows + piece * 2);
      if (MODE < 2 && of.bias != nullptr) bias = Four::load(of.bias + row);
      if (MODE == 1 && of.next_norm != nullptr) weights = Four::load(of.next_norm + row);
    }
    if (MODE == 1) {
#pragma unroll
      for (int turn = 0; turn < kEarly; ++turn) {
        if (valid(turn)) before[turn] = Four::load(of.out + place(turn));
      }
    }
    if constexpr (MODE == 3) {
      for (int j = threadIdx.x; j < mine; j += kThreads) {
        slots[j] = turn_by.out_loc[first_token + rank + j * SPLIT];
      }
      if (is_value) return;
      const T* const weight = is_query ? turn_by.q_weight : turn_by.k_weight;
      if (weight != nullptr && slot < kPass) weights = load_pairs(weight + piece * 2);
      int64_t position[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int token = first_token + rank + (slot + turn * kPass) * SPLIT;
        position[turn] = valid(turn) ? turn_by.positions[token] : 0;
      }
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const float* const row = turn_by.cos_sin + position[turn] * kRows;
        const float2 cosines = *reinterpret_cast<const float2*>(row + piece * 2);
        const float2 sines = *reinterpret_cast<const float2*>(row + kRows / 2 + piece * 2);
        angles[turn] = make_float4(cosines.x, cosines.y, sines.x, sines.y);
      }
    }
  };

  float sum[TOKENS / 2];
  if (warp == kWarps) {
    if (lane == 0) {
      publish_memory();  // x, which the kernel before may have written
      for (int i = 0; i < ahead; ++i) copy_tokens(i, i);
    }
    __syncwarp();
    load_early();
    if (lane == 0) {
      uint32_t parity = 0;
      for (int i = ahead, stage = 0; i < count; ++i) {
        wait_barrier(empty + stage * 8, parity);
        copy_weights(i, stage);
        copy_tokens(i, stage);
        if (++stage == of.stages) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    load_early();
    if (of.squares != nullptr) {  // while the first tokens come: four lanes a token
      for (int begin = warp * 8; begin < mine; begin += kWarps * 8) {
        const int j = begin + lane / 4 < mine ? begin + lane / 4 : mine - 1;
        const int64_t token = first_token + rank + j * SPLIT;
        float all = 0.0f;
#pragma unroll 4
        for (int i = lane % 4; i < of.parts; i += 4) all += of.squares[token * of.parts + i];
        all = group_sum<4>(all);
        if (lane % 4 == 0) scales[j] = rsqrtf(all / of.k + of.eps);
      }
    }
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sum[i] = 0.0f;
    const uint32_t rows_of_group = warp / 4 % GROUPS * 64 * kRowBytes;
    const int way = warp / (4 * GROUPS);
    uint32_t parity = 0;
    for (int i = way, stage = way, last = 0; i < count; i += WAYS) {
      wait_barrier(full + stage * 8, parity);
      const uint64_t a = operand(start + stage * kStageBytes + rows_of_group);
      const uint64_t b = operand(start + stage * kStageBytes + kRows * kRowBytes);
      begin_products();
#pragma unroll
      for (int part = 0; part < kChunk / 16; ++part) {
        multiply<TOKENS / 8>(sum, a + 2 * part, b + 2 * part);
      }
      end_products();
      wait_products<1>();
      if (i >= WAYS && i - WAYS + of.stages < count && lane == 0) arrive(empty + last * 8);
      last = stage;
      stage += WAYS;
      if (stage >= of.stages) stage -= of.stages, parity ^= 1;
    }
    wait_products<0>();
  }
  __syncthreads();  // all of the ring has been read: sums take its place

  float* const sums = reinterpret_cast<float*>(ring);
  if (warp < kWarps) {
    const int row = warp % (4 * GROUPS) * 16 + lane / 4, token = lane % 4 * 2;
    float* const mine_of = sums + warp / (4 * GROUPS) * kSums;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      mine_of[(i / 4 * 8 + token + i % 2) * kPitch + row + i % 4 / 2 * 8] = sum[i];
    }
  }
  uint32_t places[SPLIT];
  if constexpr (SPLIT > 1) {
    arrive_cluster();
#pragma unroll
    for (int i = 0; i < SPLIT; ++i) places[i] = address_in(start, i);
    wait_cluster();
  } else {
    __syncthreads();
  }

#pragma unroll
  for (int begin = 0; begin < kTurns; begin += kBatch) {
    float4 terms[kBatch][kTotals][kTerms];  // all loads before the first sum
    Four kept[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int turn = begin + b;
      if (turn >= kTurns) break;
      // Only what is used is loaded from other blocks: this block does not wait for a load whose
      // result nobody takes, and then the other one may have ended when it gets there, a fault.
      const bool here = valid(turn);
      const int token = here ? rank + (slot + turn * kPass) * SPLIT : 0;
#pragma unroll
      for (int t = 0; t < kTotals; ++t) {
#pragma unroll
        for (int i = 0; i < kTerms; ++i) {
          const int at = i % WAYS * kSums + token * kPitch + t * kOutputs + piece * (MODE == 3 ? 2 : 4);
          float4& term = terms[b][t][i];
          if constexpr (SPLIT > 1) {
            const uint32_t from = places[i / WAYS] + at * 4;
            term = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (here && MODE == 3) term = load_pairs_in_cluster(from, from + kRows * 2);
            else if (here) term = load_in_cluster(from);
          } else if constexpr (MODE == 3) {
            const float2 first = *reinterpret_cast<const float2*>(sums + at);
            const float2 second = *reinterpret_cast<const float2*>(sums + at + kRows / 2);
            term = make_float4(first.x, first.y, second.x, second.y);
          } else {
            term = *reinterpret_cast<const float4*>(sums + at);
          }
        }
      }
      if (MODE == 1) {
        if (turn < kEarly) kept[b] = before[turn < kEarly ? turn : 0];
        else if (valid(turn)) kept[b] = Four::load(of.out + place(turn));
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int t = 0; t < kTotals; ++t) {
#pragma unroll
        for (int i = 1; i < kTerms; ++i) {
          if (begin + b < kTurns) terms[b][t][0] = terms[b][t][0] + terms[b][t][i];
        }
      }
    }
    if constexpr (MODE == 3) {  // step by step for all turns, so that none waits for the one before
      float four[kBatch][4], squares[kBatch] = {};
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int turn = begin + b;
        if (turn >= kTurns) break;
        const float scale = of.squares != nullptr && valid(turn) ? scales[slot + turn * kPass] : 1.0f;
        const float4 v = terms[b][0][0];
        const float scaled[4] = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          four[b][i] = scaled[i] + to_float(bias.of[i]);
          squares[b] += four[b][i] * four[b][i];
        }
      }
      if (!is_value && turn_by.q_weight != nullptr) {
#pragma unroll
        for (int step = kPieces / 2; step > 0; step /= 2) {
#pragma unroll
          for (int b = 0; b < kBatch; ++b) squares[b] += __shfl_xor_sync(kAll, squares[b], step);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const float factor = rsqrtf(squares[b] / kRows + turn_by.eps);
#pragma unroll
          for (int i = 0; i < 4; ++i) four[b][i] *= factor * to_float(weights.of[i]);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int turn = begin + b;
        if (turn >= kTurns) break;
        float(&f)[4] = four[b];
        if (!is_value) {
          const float cosines[2] = {angles[turn].x, angles[turn].y};
          const float sines[2] = {angles[turn].z, angles[turn].w};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float first = f[i], second = f[i + 2];
            f[i] = first * cosines[i] - second * sines[i];
            f[i + 2] = second * cosines[i] + first * sines[i];
          }
        }
        const int token = slot + turn * kPass;  // of this block's
        bool stores = valid(turn);
        T* to = of.out;
        if (is_query) {
          to += (int64_t{first_token + rank + token * SPLIT} * turn_by.q_heads + tile) * kRows;
        } else {
          const int place = stores ? slots[token] : -1;
          const int head = tile - turn_by.q_heads - (is_value ? turn_by.kv_heads : 0);
          to = (is_value ? turn_by.v_slots : turn_by.k_slots) + place * turn_by.slot_step +
               head * kRows;
          stores = place >= 0;
        }
        if (stores) {
          const Two first = {{from_float<T>(f[0]), from_float<T>(f[1])}};
          const Two second = {{from_float<T>(f[2]), from_float<T>(f[3])}};
          first.store(to + piece * 2);
          second.store(to + kRows / 2 + piece * 2);
        }
      }
    } else {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int turn = begin + b;
        if (turn >= kTurns) break;
        const bool here = valid(turn);
        const float scale = of.squares != nullptr && here ? scales[slot + turn * kPass] : 1.0f;
        const float4 first_total = terms[b][0][0], second = terms[b][kTotals - 1][0];
        float four[4] = {first_total.x * scale, first_total.y * scale, first_total.z * scale,
                         first_total.w * scale};
        const float up[4] = {second.x * scale, second.y * scale, second.z * scale, second.w * scale};
        Four result, next;
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (MODE == 2) four[i] = gated(four[i], up[i]);
          else four[i] += to_float(bias.of[i]);
          if (MODE == 1) four[i] += to_float(kept[b].of[i]);
          result.of[i] = from_float<T>(four[i]);
          if (MODE == 1) {
            const float rounded = to_float(result.of[i]);
            square += rounded * rounded;
            next.of[i] = from_float<T>(rounded * to_float(weights.of[i]));
          }
        }
        if (here) result.store(of.out + place(turn));
        if (MODE == 1 && of.next_norm != nullptr) {
          if (here) next.store(of.scaled + place(turn));
          // Pieces of a token are 16 or 32 neighbouring lanes; with more rows they would not be.
          square = group_sum<kPieces < 32 ? kPieces : 32>(here ? square : 0.0f);
          if (piece == 0 && slot < kPass && slot + turn * kPass < mine && row < stored) {
            const int64_t token = first_token + rank + (slot + turn * kPass) * SPLIT;
            of.next_squares[token * ((of.rows + kRows - 1) / kRows) + tile] = square;
          }
        }
      }
    }
  }
  if constexpr (SPLIT > 1) {  // others may still read this block's sums
    __syncwarp();
    arrive_cluster_early();
    wait_cluster();
  }
}

}  // namespace

// (out [M, N], x [M, K], w [N, K], bias [N] or None, squares [M, parts] or None, eps, next_norm [N]
//  or None, scaled [M, N] or None, next_squares [M, tiles] or None, bytes of shared memory; with
//  MODE 3, where out is [M, q heads, d], also positions [M], slots of the tokens [M], cos_sin [n, d],
//  q_weight [d] or None, k_weight, eps of the heads, k_slots [slots, kv heads, d], v_slots, q heads,
//  kv heads)
EXPORT(wide_linear) {
  static_assert((MODE != 1 && MODE != 3) || GROUPS <= 2, "a warp sums a token's squares");
  static_assert(MODE != 3 || TOKENS <= 128, "angles wait in registers");
  Arguments of = {};
  of.out = args.data<T>(0);
  of.bias = args.data<const T>(3);
  of.squares = args.data<const float>(4);
  of.eps = args.number(5);
  of.next_norm = args.data<const T>(6);
  of.scaled = args.data<T>(7);
  of.next_squares = args.data<float>(8);
  of.tokens = static_cast<int>(args.size(1, 0));
  of.token_tiles = (of.tokens + TOKENS - 1) / TOKENS;
  of.k = static_cast<int>(args.size(1, 1));
  of.rows = static_cast<int>(args.size(2, 0));
  of.parts = of.squares != nullptr ? static_cast<int>(args.size(4, 1)) : 0;
  Turn turn = {};
  if (MODE == 3) {
    turn.positions = args.data<const int>(10);
    turn.out_loc = args.data<const int>(11);
    turn.cos_sin = args.data<const float>(12);
    turn.q_weight = args.data<const T>(13);
    turn.k_weight = args.data<const T>(14);
    turn.eps = args.number(15);
    turn.k_slots = args.data<T>(16);
    turn.v_slots = args.data<T>(17);
    turn.slot_step = args.stride(16, 0);
    turn.q_heads = static_cast<int>(args.integer(18));
    turn.kv_heads = static_cast<int>(args.integer(19));
  }
  const int room = static_cast<int>(args.integer(9)) - kTail - 1024;
  const int chunks = (of.k / kChunk + SPLIT - 1) / SPLIT;
  of.stages = room / kStageBytes;
  if (of.stages > chunks) of.stages = chunks;
  if (of.stages > kMaxStages) of.stages = kMaxStages;
  if (of.stages < WAYS + 1) of.stages = WAYS + 1;  // a way lets go of a stage behind its next one
  const int ring = of.stages * kStageBytes > kSumBytes ? of.stages * kStageBytes : kSumBytes;
  const int shared = ring + kTail + 1024;
  static bool raised = false;
  if (!raised) {
    if (check(cudaFuncSetAttribute(wide_linear, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   232448))) {
      return -1;
    }
    raised = true;
  }
  CUtensorMap weight_map, token_map;
  if (make_tile_map(&weight_map, args.data<const void>(2), of.rows, of.k, kOutputs)) return -1;
  if (make_tile_map(&token_map, args.data<const void>(1), of.tokens, of.k, TOKENS)) return -1;
  const int stored = MODE == 2 ? of.rows / 2 : of.rows;
  const int64_t tiles = (stored + kOutputs - 1) / kOutputs;
  return launch_clusters(wide_linear, tiles * of.token_tiles * SPLIT, SPLIT, kThreads, shared,
                         args.stream(), weight_map, token_map, of, turn);
}
