// What a second thread, or a forward between backward and step, may do while the first thread
// trains. Exit status 0 where all is as it must be.
//
//     second_thread drain      another thread drains a row: the next forward still waits for its
//                              new weight
//     second_thread commits    another thread drains beside commits with guessed factors: every bit
//                              is as without it
//     second_thread host       a forward between backward and step reads the old weight, whole,
//                              also while step() is called
//     second_thread device     the same, of a row that the device updates
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>

#include "engine_c.h"
#include "work_queue.h"

using namespace hytrain_fx;

namespace {

// An engine with one row.
struct Trained {
  explicit Trained(int64_t size, bool on_device = false) : n(size) {
    EngineOptions options = options_on_cpu(2, ring, factors);
    check(hytrain_create(&options, &engine));
    RowSpec spec{n, 0, static_cast<int32_t>(Dtype::kF32), weight.data()};
    check(hytrain_add_row(engine, &spec));
    HostStates host{master.data(), nullptr, {{m.data(), v.data(), nullptr}}, reinterpret_cast<char*>(slot.data()), nullptr, 1};
    DeviceStates device{weight.data(), {{m.data(), v.data(), nullptr}}};
    check(on_device ? hytrain_place_on_device(engine, 0, &device) : hytrain_place_on_host(engine, 0, &host));
    item.row = 0;
    item.grad = on_device ? grad.data() : nullptr;
    item.scalars = kScalars;
  }
  ~Trained() { check(hytrain_destroy(engine)); }

  void backward(void* stream) {
    const void* grads[] = {grad.data()};
    if (!item.grad) check(hytrain_grad_offload(engine, &row, grads, 1, stream));
    check(hytrain_arm_cpu(engine, &row, 1));
    check(hytrain_arm_gpu(engine, &row, 1, stream));
    check(hytrain_arm_reload(engine, &row, 1));
    check(hytrain_release(engine, &row, 1, stream));
  }

  const int32_t row = 0;
  int64_t n;
  std::vector<float> weight = std::vector<float>(n, 1.0f), master = weight, m = std::vector<float>(n), v = m, slot = m;
  std::vector<float> grad = std::vector<float>(n, 0.5f), factors = std::vector<float>(2);
  std::vector<char> ring = std::vector<char>(16 * n);
  CommitItem item{};
  Engine* engine = nullptr;
};

int drain() {
  Trained of(4096);
  int stale = 0;
  for (int step = 0; step < 10; ++step) {
    check(hytrain_set_delay(of.engine, 3, 20000.0));  // of the copy of the new weight
    WorkQueue compute;
    of.backward(&compute);
    check(hytrain_commit(of.engine, &of.item, 1, nullptr, 0, -1, &compute));
    std::thread other([&] { check(hytrain_drain(of.engine, &of.row, 1)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the first thread is still in Python
    check(hytrain_wait(of.engine, &of.row, 1, &compute));
    std::promise<float> read;
    std::future<float> got = read.get_future();
    compute.enqueue([&] { read.set_value(of.weight[0]); });
    const float seen = got.get();
    other.join();
    stale += seen != of.weight[0];
  }
  if (stale > 0) std::fprintf(stderr, "second_thread: %d of 10 forwards read the old weight after their wait()\n", stale);
  return stale > 0;
}

int commits() {
  constexpr int64_t kSize = 1 << 18;
  constexpr int kSteps = 200;
  std::vector<char> memory(64 * 4 * (4 * kGranule + kShadowApartBytes) + 64);
  Trained of(kSize);
  char* const base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  ShadowMemory shadow{base, static_cast<int64_t>(memory.size()) - 64, 3};
  check(hytrain_set_shadow(of.engine, &shadow));
  std::vector<float> master = of.master, m(kSize), v(kSize);
  const float clip = 0.5f;
  of.item.n_factors = 1;
  std::atomic<bool> ended{false};
  std::thread other([&] {
    while (!ended) {
      check(hytrain_drain(of.engine, &of.row, 1));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  for (int step = 0; step < kSteps; ++step) {
    for (int64_t i = 0; i < kSize; ++i) of.grad[i] = 0.01f * static_cast<float>((i * 7 + step) % 13 - 6);
    check(hytrain_wait(of.engine, &of.row, 1, nullptr));
    of.backward(nullptr);
    float* slots = nullptr;
    check(hytrain_factor_slots(of.engine, &slots));
    const void* sources[] = {&clip};
    check(hytrain_commit(of.engine, &of.item, 1, sources, 1, -1, nullptr));
    UpdateScalars scalars = of.item.scalars;
    scalars.factor_count = 1;
    scalars.factors[0] = clip;
    update_chunk(of.grad.data(), Dtype::kF32, master.data(), {{m.data(), v.data(), nullptr}}, nullptr, Dtype::kF32, kSize, scalars);
  }
  ended = true;
  other.join();
  check(hytrain_drain(of.engine, &of.row, 1));
  GuessCounts counts{};
  check(hytrain_guess_counts(of.engine, &counts));
  const bool same = of.master == master && of.m == m && of.v == v;
  if (!same) std::fprintf(stderr, "second_thread: other bits than without the second thread\n");
  if (counts.params == 0) std::fprintf(stderr, "second_thread: nothing was guessed\n");
  return !same || counts.params == 0;
}

int between(bool on_device) {
  Trained of(4096, on_device);
  WorkQueue compute;
  check(hytrain_wait(of.engine, &of.row, 1, &compute));
  of.backward(&compute);
  check(hytrain_wait(of.engine, &of.row, 1, &compute));  // the evaluation's
  std::promise<std::pair<float, float>> read;
  auto got = read.get_future();
  compute.enqueue([&] {
    const float first = of.weight[0];
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    read.set_value({first, of.weight[of.n - 1]});
  });
  check(hytrain_commit(of.engine, &of.item, 1, nullptr, 0, -1, &compute));
  const auto [first, last] = got.get();
  check(hytrain_drain(of.engine, &of.row, 1));
  const bool right = first == 1.0f && last == 1.0f && of.weight[0] != 1.0f;
  if (!right) std::fprintf(stderr, "second_thread: the forward read %g and then %g, expected the old weight, 1\n", first, last);
  return !right;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count == 2 ? arguments[1] : "";
  if (what == "drain") return drain();
  if (what == "commits") return commits();
  if (what == "host" || what == "device") return between(what == "device");
  std::fprintf(stderr, "usage: second_thread drain|commits|host|device\n");
  return 2;
}
