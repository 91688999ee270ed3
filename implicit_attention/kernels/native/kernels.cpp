// The native operations behind a plain C interface. Nothing of torch is included: its pool of threads is handed over as
// an address, and tensors as addresses and steps.

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "adjoint.h"
#include "solve.h"
#include "step.h"

#define IA_EXPORT extern "C" __attribute__((visibility("default")))

constexpr int32_t ABI = 7;
// What a call returns that found no memory; else it returns how many queries have no answer.
constexpr int64_t NO_MEMORY = -1;
// Fewer products of a number are not worth waking threads for.
constexpr double PARALLEL = 1 << 20;

// libtorch's torch_parallel_for, of its stable interface.
using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);

namespace {

// Memory of a call, which a thread keeps for its next one unless it is large: fresh pages cost as much as a small solve.
struct Kept {
  void *data = nullptr;
  int64_t bytes = 0;
  ~Kept() { std::free(data); }
};
thread_local Kept kept;
constexpr int64_t KEEP = 1 << 22;

struct Memory {
  void *data;
  explicit Memory(int64_t bytes) : bytes(padded(bytes, 64)) {
    if (kept.bytes >= this->bytes) {
      this->bytes = kept.bytes;
      data = kept.data;
      kept.data = nullptr;
      kept.bytes = 0;
    } else {
      data = std::aligned_alloc(64, this->bytes);
    }
  }
  ~Memory() {
    if (data && bytes <= KEEP && bytes > kept.bytes) {
      std::free(kept.data);
      kept.data = data;
      kept.bytes = bytes;
    } else {
      std::free(data);
    }
  }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

 private:
  int64_t bytes;
};

// Tasks that threads take one after the other, whichever thread is free.
template <typename Task>
struct Queue {
  Task task;
  int64_t count;
  std::atomic<int64_t> next{0};

  static void work(int64_t, int64_t, void *self) {
    Queue &queue = *static_cast<Queue *>(self);
    queue.task([&queue] {
      const int64_t taken = queue.next.fetch_add(1, std::memory_order_relaxed);
      return taken < queue.count ? taken : int64_t(-1);
    });
  }
};

// `task` is called by every thread with a function that gives the number of the next task, or -1.
template <typename Task>
void in_threads(int64_t count, double operations, const void *parallel_for, int64_t threads, Task task) {
  Queue<Task> queue{task, count};
  if (parallel_for && threads > 1 && count > 1 && operations > PARALLEL)
    reinterpret_cast<ParallelFor>(const_cast<void *>(parallel_for))(0, threads < count ? threads : count, 1, &Queue<Task>::work, &queue);
  // What no thread took, all of it where there is one.
  Queue<Task>::work(0, 0, &queue);
}

Problem read_problem(Reader &reader, void *const *data) {
  Problem p{};
  Axes &axes = p.axes;
  axes.kept = static_cast<int>(reader.next());
  axes.folded = static_cast<int>(reader.next());
  p.queries = reader.next();
  p.count = reader.next();
  p.dim = reader.next();
  p.mask_kind = static_cast<MaskKind>(reader.next());
  p.causal = reader.next() != 0;
  p.first = reader.next();
  axes.sets = axes.shares = 1;
  const int batch = axes.kept + axes.folded;
  for (int i = 0; i < batch; ++i) {
    axes.size[i] = reader.next();
    (i < axes.kept ? axes.sets : axes.shares) *= axes.size[i];
  }
  for (int i = 0; i < batch; ++i) p.out[i] = reader.next();
  p.field = reader.operand(data[0], batch + 2);
  p.keys = reader.operand(data[1], batch + 1);
  p.beta = reader.operand(data[2], batch);
  p.anchor = reader.operand(data[3], batch);
  if (p.mask_kind != NO_MASK) p.mask = reader.operand(data[4], batch + 2);
  return p;
}

// Rows that one task solves: enough to refill lanes, and enough tasks for the threads.
template <typename T>
int64_t rows_per_task(const Problem &p) {
  const int64_t all = p.axes.sets * p.rows(), share = padded((all + 63) / 64, WIDTH<T>);
  return share < 4 * WIDTH<T> ? 4 * WIDTH<T> : share;
}

template <typename T>
int64_t solve(const int64_t *integers, const double *numbers, void *const *data, const void *parallel_for, int64_t threads) {
  Reader reader = {integers};
  const Problem p = read_problem(reader, data);
  const Operand initial = reader.operand(data[5], p.own() + 2);
  const SolveRule rule = {numbers[0], numbers[1], static_cast<int64_t>(numbers[2]), static_cast<int64_t>(numbers[3])};
  const Answers<T> answers = {static_cast<T *>(data[6]), static_cast<T *>(data[7]), static_cast<T *>(data[8]),
                              static_cast<T *>(data[9]), static_cast<T *>(data[10]), static_cast<int8_t *>(data[11]),
                              static_cast<int32_t *>(data[12])};
  const int64_t size = rows_per_task<T>(p), parts = (p.rows() + size - 1) / size;
  std::atomic<int64_t> failed{0};
  std::atomic<bool> lost{false};
  const double operations = 8.0 * p.axes.sets * p.rows() * p.count * p.dim;
  in_threads(p.axes.sets * parts, operations, parallel_for, threads, [&](auto next) {
    Memory memory(SolveTile<T>::bytes(p));
    if (!memory.data) {
      lost = true;
      return;
    }
    SolveTile<T> tile(p, initial, rule, answers, memory.data);
    for (int64_t task = next(); task >= 0; task = next()) {
      const int64_t begin = task % parts * size, end = begin + size;
      tile.run(task / parts, begin, end < p.rows() ? end : p.rows());
    }
    failed += tile.failed;
  });
  return lost ? NO_MEMORY : failed.load();
}

using Turn = std::atomic<int64_t>;

// Gradients of shared keys are sums over queries, made in parts that depend on the shape alone, and in order.
template <typename T>
int64_t parts_of_sums(const Problem &p) {
  const int64_t most = (p.rows() + 2 * WIDTH<T> - 1) / (2 * WIDTH<T>), wanted = 32 / (p.axes.sets < 32 ? p.axes.sets : 32);
  return most < wanted ? most : wanted;
}

template <typename T>
int64_t adjoint(const int64_t *integers, const double *numbers, void *const *data, const void *parallel_for, int64_t threads) {
  Reader reader = {integers};
  const Problem p = read_problem(reader, data);
  AdjointOperands<T> given{};
  given.cotangent = p.field;
  given.state = reader.operand(data[5], p.own() + 2);
  given.mean = reader.operand(data[6], p.own() + 2);
  given.rtol = numbers[0];
  given.max_steps = static_cast<int64_t>(numbers[1]);
  given.value = static_cast<T *>(data[7]);
  given.by_beta = static_cast<T *>(data[8]);
  T *const by_keys = static_cast<T *>(data[9]), *const by_bias = static_cast<T *>(data[10]);
  given.residual = static_cast<T *>(data[11]);
  given.tolerance = static_cast<T *>(data[12]);
  given.status = static_cast<int8_t *>(data[13]);
  given.steps = static_cast<int32_t *>(data[14]);
  given.negative = static_cast<bool *>(data[15]);
  const int64_t sets = p.axes.sets, parts = by_bias ? 1 : parts_of_sums<T>(p), size = padded((p.rows() + parts - 1) / parts, WIDTH<T>);
  const int64_t wide = padded(p.dim, LANES<T>), numbers_of_set = p.count * wide;
  // Where nothing is left to sum the answer is written where it belongs; else each thread has sums of its own.
  const bool direct = parts == 1 && wide == p.dim;
  const int64_t own = direct ? 0 : padded(numbers_of_set * sizeof(T), 64);
  // So many parts of the sums of a set are in its gradient.
  Memory memory_of_turns(sets * sizeof(Turn));
  if (!memory_of_turns.data) return NO_MEMORY;
  Turn *const turns = static_cast<Turn *>(memory_of_turns.data);
  for (int64_t set = 0; set < sets; ++set) new (turns + set) Turn{0};
  std::atomic<bool> lost{false};
  const double operations = 16.0 * sets * p.rows() * p.count * p.dim;
  in_threads(sets * parts, operations, parallel_for, threads, [&](auto next) {
    Memory memory(AdjointTile<T>::bytes(p) + own);
    if (!memory.data) {
      lost = true;
      return;
    }
    char *const start = static_cast<char *>(memory.data);
    AdjointTile<T> tile(p, given, Arena{start + own});
    for (int64_t task = next(); task >= 0; task = next()) {
      // The first parts of all sets, then the second ones: whose turn it is has been taken long before.
      const int64_t set = task % sets, part = task / sets, begin = part * size, end = begin + size;
      T *const to = by_keys + set * p.count * p.dim, *const summed = direct ? to : reinterpret_cast<T *>(start);
      std::memset(summed, 0, numbers_of_set * sizeof(T));
      tile.run(set, begin, end < p.rows() ? end : p.rows(), summed, by_bias);
      if (direct) continue;
      while (turns[set].load(std::memory_order_acquire) != part) std::this_thread::yield();
      for (int64_t j = 0; j < p.count; ++j)
        for (int64_t d = 0; d < p.dim; ++d) {
          const T sum = summed[j * wide + d];
          to[j * p.dim + d] = part == 0 ? sum : to[j * p.dim + d] + sum;
        }
      turns[set].store(part + 1, std::memory_order_release);
    }
  });
  return lost ? NO_MEMORY : 0;
}

// How many rows have a better state after an evaluation, and how many are unfinished.
template <typename T>
int64_t step_rows(const int64_t *integers, const double *numbers, void *const *data, const void *parallel_for, int64_t threads) {
  const int64_t rows = integers[0], n = integers[1], history = integers[2];
  const StepRule rule = {numbers[0], numbers[1], numbers[2], numbers[3], integers[3], integers[4] != 0, integers[5] != 0};
  const auto of = [data](int i) { return static_cast<T *>(data[i]); };
  const auto flags = [data](int i) { return static_cast<bool *>(data[i]); };
  const auto counts = [data](int i) { return static_cast<int32_t *>(data[i]); };
  const Steps<T> all = {n, history, of(0), of(1), of(2), of(3), of(4), of(5), flags(6), flags(7), of(8), of(9), counts(10),
                        counts(11), static_cast<int8_t *>(data[12]), flags(13), of(14), of(15), of(16), of(17), of(18),
                        of(19), counts(20)};
  const int64_t part = n < 4096 ? 4096 / (n + 1) + 1 : 1;
  in_threads((rows + part - 1) / part, 16.0 * rows * n * (history + 1), parallel_for, threads, [&](auto next) {
    for (int64_t task = next(); task >= 0; task = next())
      for (int64_t i = task * part; i < rows && i < (task + 1) * part; ++i) step(all, i, rule);
  });
  int64_t better = 0, active = 0;
  for (int64_t i = 0; i < rows; ++i) {
    better += all.better[i];
    active += all.active[i];
  }
  // Two numbers in one; there are fewer than 2^31 rows.
  return better << 32 | active;
}

}  // namespace

IA_EXPORT int32_t ia_abi(void) { return ABI; }
IA_EXPORT const char *ia_isa(void) { return IA_ISA; }

// Whether the processor and its system have the instructions of this library.
IA_EXPORT int32_t ia_supported(void) {
#if IA_BYTES == 64
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw");
#elif IA_BYTES == 32
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return 1;
#endif
}

IA_EXPORT int64_t ia_solve(int64_t bytes, const int64_t *integers, const double *numbers, void *const *data,
                           const void *parallel_for, int64_t threads) {
  return bytes == 4 ? solve<float>(integers, numbers, data, parallel_for, threads)
                    : solve<double>(integers, numbers, data, parallel_for, threads);
}

IA_EXPORT int64_t ia_adjoint(int64_t bytes, const int64_t *integers, const double *numbers, void *const *data,
                             const void *parallel_for, int64_t threads) {
  return bytes == 4 ? adjoint<float>(integers, numbers, data, parallel_for, threads)
                    : adjoint<double>(integers, numbers, data, parallel_for, threads);
}

// Whether all numbers are finite.
IA_EXPORT int32_t ia_finite(int64_t bytes, const void *numbers, int64_t count) {
  return bytes == 4 ? finite(static_cast<const float *>(numbers), count) : finite(static_cast<const double *>(numbers), count);
}

// What comes between two evaluations of a user's map, for states (rows, n).
IA_EXPORT int64_t ia_step(int64_t bytes, const int64_t *integers, const double *numbers, void *const *data,
                          const void *parallel_for, int64_t threads) {
  return bytes == 4 ? step_rows<float>(integers, numbers, data, parallel_for, threads)
                    : step_rows<double>(integers, numbers, data, parallel_for, threads);
}
