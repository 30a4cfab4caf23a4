// Attention of draft trees' rows over a paged K/V cache on a CPU (engine/tree_native.py says how it is called).
//
// The cache is that of vLLM's CPU_ATTN for isa "vec": of each block and kv head, keys as [head_dim, block],
// then values as [block, head_dim]. All arithmetic is in float32.
#include <cstdint>
#include <cstring>
#include <vector>

typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4)));
typedef uint16_t half_vec __attribute__((vector_size(32), aligned(2)));

namespace {
constexpr int W = 16;     // floats in a vector
constexpr int TILE = 8;   // query rows that go through the cache together
constexpr int WIDE = 2;   // vectors of positions, or of values, at a time
constexpr float NOTHING = -1e30f;

inline vec load(const float* p) { vec x; std::memcpy(&x, p, sizeof x); return x; }
inline vec load(const uint16_t* p) {
  half_vec h; std::memcpy(&h, p, sizeof h);
  uvec u = __builtin_convertvector(h, uvec) << 16;
  vec x; std::memcpy(&x, &u, sizeof x); return x;
}
inline float scalar(float x) { return x; }
inline float scalar(uint16_t x) { uint32_t u = uint32_t(x) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline void store(float* p, float x) { *p = x; }
inline void store(uint16_t* p, float x) {  // to nearest, ties to even
  uint32_t u; std::memcpy(&u, &x, 4);
  *p = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline vec all(float x) { vec v; for (int i = 0; i < W; ++i) v[i] = x; return v; }
inline float sum(vec x) { float s = 0; for (int i = 0; i < W; ++i) s += x[i]; return s; }

// 2^n e^r with x = n ln 2 + r: a polynomial of degree 6 on |r| <= ln 2 / 2.
inline vec exponential(vec x) {
  const vec magic = all(12582912.0f);
  x = x < -87.0f ? all(-87.0f) : x;
  vec n = (x * 1.44269504088896341f + magic) - magic;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = all(1.3981999507e-3f);
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ivec e = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec scale; std::memcpy(&scale, &e, sizeof scale);
  return p * scale;
}

struct Shape {
  int64_t heads, kv_heads, dim, block, block_stride, head_stride;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head;
  float scale;
};

template <typename T>
void tile(const Shape& s, const T* q, const T* k, const T* v, const T* cache, T* out, const int32_t* table,
          int64_t context, int64_t rows, const uint8_t* visible, int64_t kv, int64_t begin, int64_t count,
          std::vector<float>& memory) {
  const int64_t group = s.heads / s.kv_heads, padded = (context + rows + 2 * W * WIDE) / W * W;
  memory.resize(TILE * (padded + s.dim) + 64);
  float* queries = memory.data();
  float* scores = queries + TILE * s.dim;
  int64_t row_of[TILE], head_of[TILE];
  for (int t = 0; t < TILE; ++t) {
    const int64_t at = begin + (t < count ? t : count - 1);
    row_of[t] = at / group;
    head_of[t] = kv * group + at % group;
    const T* from = q + row_of[t] * s.q_row + head_of[t] * s.q_head;
    for (int64_t d = 0; d < s.dim; ++d) queries[t * s.dim + d] = scalar(from[d]) * s.scale;
  }
  for (int64_t first = 0; first < context; first += s.block) {
    const T* keys = cache + int64_t(table[first / s.block]) * s.block_stride + kv * s.head_stride;
    const int64_t length = context - first < s.block ? context - first : s.block;
    for (int64_t at = 0; at < length; at += W * WIDE) {
      vec acc[TILE][WIDE];
      for (int t = 0; t < TILE; ++t) for (int w = 0; w < WIDE; ++w) acc[t][w] = all(0.0f);
      for (int64_t d = 0; d < s.dim; ++d) {
        vec key[WIDE];
        for (int w = 0; w < WIDE; ++w) key[w] = load(keys + d * s.block + at + w * W);
#pragma GCC unroll 8
        for (int t = 0; t < TILE; ++t) {
          const float x = queries[t * s.dim + d];
          for (int w = 0; w < WIDE; ++w) acc[t][w] += key[w] * x;
        }
      }
      for (int t = 0; t < TILE; ++t)
        for (int w = 0; w < WIDE; ++w)
          std::memcpy(scores + t * padded + first + at + w * W, &acc[t][w], sizeof(vec));
    }
  }
  for (int64_t j = 0; j < rows; ++j) {
    const T* key = k + j * s.k_row + kv * s.k_head;
    for (int t = 0; t < TILE; ++t) {
      float& score = scores[t * padded + context + j];
      score = NOTHING;
      if (!visible[row_of[t] * rows + j]) continue;
      vec acc = all(0.0f);
      for (int64_t d = 0; d < s.dim; d += W) acc += load(key + d) * load(queries + t * s.dim + d);
      score = sum(acc);
    }
  }
  const int64_t length = context + rows;
  float inverse[TILE];
  for (int t = 0; t < TILE; ++t) {
    float* mine = scores + t * padded;
    for (int64_t j = length; j < padded; ++j) mine[j] = NOTHING;
    vec high = all(NOTHING);
    for (int64_t j = 0; j < padded; j += W) { vec x = load(mine + j); high = x > high ? x : high; }
    float top = NOTHING;
    for (int i = 0; i < W; ++i) top = high[i] > top ? high[i] : top;
    vec total = all(0.0f);
    for (int64_t j = 0; j < padded; j += W) {
      vec x = load(mine + j);
      vec p = x <= NOTHING ? all(0.0f) : exponential(x - top);
      std::memcpy(mine + j, &p, sizeof p);
      total += p;
    }
    inverse[t] = 1.0f / sum(total);
  }
  for (int64_t d = 0; d < s.dim; d += W) {
    vec acc[TILE];
    for (int t = 0; t < TILE; ++t) acc[t] = all(0.0f);
    for (int64_t first = 0; first < context; first += s.block) {
      const T* values = cache + int64_t(table[first / s.block]) * s.block_stride + kv * s.head_stride + s.block * s.dim;
      const int64_t end = context - first < s.block ? context - first : s.block;
      for (int64_t j = 0; j < end; ++j) {
        const vec value = load(values + j * s.dim + d);
#pragma GCC unroll 8
        for (int t = 0; t < TILE; ++t) acc[t] += value * scores[t * padded + first + j];
      }
    }
    for (int64_t j = 0; j < rows; ++j) {
      const vec value = load(v + j * s.v_row + kv * s.v_head + d);
      for (int t = 0; t < TILE; ++t) acc[t] += value * scores[t * padded + context + j];
    }
    for (int t = 0; t < count; ++t) {
      T* to = out + row_of[t] * s.out_row + head_of[t] * s.out_head + d;
      for (int i = 0; i < W; ++i) store(to + i, acc[t][i] * inverse[t]);
    }
  }
}

template <typename T>
void run(const Shape& s, const T* q, const T* k, const T* v, const T* cache, T* out, int64_t trees, const int64_t* first,
         const int64_t* rows, const int64_t* context, const int64_t* request, const int32_t* table,
         int64_t table_row, const uint8_t* visible) {
  struct Task { int64_t tree, kv, begin, count, mask; };
  std::vector<Task> tasks;
  const int64_t group = s.heads / s.kv_heads;
  int64_t mask = 0;
  for (int64_t i = 0; i < trees; ++i) {
    for (int64_t kv = 0; kv < s.kv_heads; ++kv)
      for (int64_t begin = 0; begin < rows[i] * group; begin += TILE) {
        const int64_t left = rows[i] * group - begin;
        tasks.push_back({i, kv, begin, left < TILE ? left : TILE, mask});
      }
    mask += rows[i] * rows[i];
  }
#pragma omp parallel
  {
    std::vector<float> memory;
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < int64_t(tasks.size()); ++n) {
      const Task& t = tasks[n];
      const int64_t i = t.tree, at = first[i];
      tile<T>(s, q + at * s.q_row, k + at * s.k_row, v + at * s.v_row, cache, out + at * s.out_row,
              table + request[i] * table_row, context[i], rows[i], visible + t.mask, t.kv, t.begin, t.count, memory);
    }
  }
}
}  // namespace

// sizes: heads, kv_heads, dim, block, block_stride, head_stride, then row and head strides of q, k, v, out.
extern "C" void specx_tree_rows(int bf16, const int64_t* sizes, float scale, const void* q, const void* k, const void* v,
                                const void* cache, void* out, int64_t trees, const int64_t* first, const int64_t* rows,
                                const int64_t* context, const int64_t* request, const int32_t* table,
                                int64_t table_row, const uint8_t* visible) {
  Shape s;
  std::memcpy(&s, sizes, 14 * sizeof(int64_t));
  s.scale = scale;
  if (bf16)
    run<uint16_t>(s, (const uint16_t*)q, (const uint16_t*)k, (const uint16_t*)v, (const uint16_t*)cache, (uint16_t*)out,
                  trees, first, rows, context, request, table, table_row, visible);
  else
    run<float>(s, (const float*)q, (const float*)k, (const float*)v, (const float*)cache, (float*)out, trees, first,
               rows, context, request, table, table_row, visible);
}
