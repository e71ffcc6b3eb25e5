// Drives the engine through its C interface, on the CPU device and without Python, for a thread
// sanitizer to watch (scripts/race_check).
//
// Random steps: rows of every dtype and placement, fp32 ones with 16-bit copies among them, units
// that sit out, delays in every stage, factors that come late and are guessed, updates that begin
// before their commit on right and wrong guesses, gradients dropped, made again and brought back a
// unit ahead, rows that move, records taken. The compute stream is the thread that launches, or a
// queue that this thread fills ahead of time. A second thread settles and drains rows and asks for
// figures all the while, as loggers, checkpoints and forks do. What the engine makes of it is
// compared, bit for bit, with update_chunk called in order. Exit status 1 where a bit differs or a
// call fails; the sanitizer has its own.
//
//     race_driver STEPS SEED
#include <cstdio>
#include <cstdlib>
#include <random>

#include "engine_c.h"
#include "work_queue.h"

using namespace hytrain_fx;

namespace {

enum Where { kHost, kDevice, kStreamed };
using Floats = std::vector<float>;
using Halves = std::vector<uint16_t>;

constexpr int kWorkers = 3, kFactorCapacity = 16, kStages = 8, kRecords = 4096, kStagingSlots = 3, kShadowSlots = 6, kShadowArrays = 4;

struct Reference {  // whole, updated in order on the main thread
  Floats master;
  std::vector<char> m, v;  // as the row has them: fp32 or bf16
};

struct TrainedRow {
  int64_t n;
  Dtype dtype, grad_dtype;
  bool copied;  // an fp32 row to which a bf16 copy was given
  int unit;
  Where where = kHost;
  std::vector<char> weight, slot, out, grad, kept;  // kept: the gradient on the device, where the states are there or streamed
  Halves high, low;
  Floats master;
  std::vector<char> m, v;
  Reference reference;
  int32_t state_width = kWideState;
  int steps = 0;
  bool sends_weight = false;  // streamed: the upper half of a master comes home too; else it is read from the weight
  int64_t slot_width() const { return dtype == Dtype::kF32 || copied ? 4 : 2; }
  States states(std::vector<char>& first, std::vector<char>& second) const {
    return {{first.data(), second.data(), nullptr}, state_width, 4294967000u, static_cast<uint32_t>(n)};
  }
  bool apart() const { return dtype == Dtype::kF16 && where == kHost; }  // the new weight has memory of its own there
  bool split() const { return dtype == Dtype::kBF16 && where != kDevice; }
};

// Gradients of several rows, on their way back to one block of memory, each padded to 64 bytes.
struct Fetched {
  std::vector<int32_t> rows;
  std::vector<char> memory;
  uint64_t number = 0;
};

std::vector<char> narrowed(const Floats& values, Dtype dtype) {
  std::vector<char> bytes(values.size() * (dtype == Dtype::kF32 ? 4 : 2));
  detail::write_weight(values.data(), bytes.data(), dtype, 0, static_cast<int64_t>(values.size()));
  return bytes;
}

Floats wide(const TrainedRow& row, const std::vector<char>& state) {
  Floats values(static_cast<size_t>(row.n));
  if (row.state_width == kWideState) {
    std::memcpy(values.data(), state.data(), state.size());
  } else {
    detail::BF16::widen(reinterpret_cast<const uint16_t*>(state.data()), values.data(), row.n);
  }
  return values;
}

class Run {
 public:
  explicit Run(unsigned seed) : random_(seed), half_on_host_(seed % 2 == 0), few_places_(seed % 3 == 0) {
    EngineOptions options{};
    options.workers = kWorkers;
    options.device_ordinal = -1;
    options.timeout_s = 60;
    options.ring = ring_.data();
    options.ring_bytes = ring_.size();
    options.factor_slots = slots_.data();
    options.factor_capacity = kFactorCapacity;
    options.slots_unpinned = static_cast<int32_t>(seed % 2);
    options.queue_places = few_places_ ? 16 : 0;
    check(hytrain_create(&options, &engine_));
    StagingMemory staging{staging_.data(), kChunk, 3, kStagingSlots};
    check(hytrain_set_staging(engine_, &staging));
    ShadowMemory shadow{shadow_.data(), static_cast<int64_t>(shadow_.size()), kShadowArrays};
    check(hytrain_set_shadow(engine_, &shadow));
    for (int r = 0; r < 12; ++r) add(r);
    other_ = std::thread([this, seed] { look_from_elsewhere(seed + 1); });
  }
  ~Run() { check(hytrain_destroy(engine_)); }

  void step() {
    if (chance(10)) delays();
    if (chance(10)) {
      catch_up();
      runs_ahead_ = chance(70);
      if (runs_ahead_ && chance(50)) check(hytrain_set_delay(engine_, 1, 300.0));  // slow updates, which it can run ahead of
      compute_.delay_us = chance(50) ? 0.0 : static_cast<double>(random_() % 300);
    }
    if (chance(15)) move();
    if (chance(20)) check(hytrain_record(engine_, chance(50)));
    std::vector<int> rows = taking_part();
    for (int unit = 0; unit < 3; ++unit) wait(of_unit(rows, unit));
    if (chance(10)) {  // zero_grad() between forward and backward
      const std::vector<int32_t> all = every();
      check(hytrain_discard(engine_, all.data(), static_cast<int>(all.size())));
    }
    if (chance(10)) scales_ = chance(60);
    const bool doubtful = scales_, skips = doubtful && chance(20);
    std::vector<CommitItem> items = prepare(rows, skips);
    if (chance(10)) speculates_ = chance(70);
    const std::vector<CommitItem> foreseen = speculates_ ? foresee(items) : std::vector<CommitItem>{};
    std::thread backward([&] { this->backward(rows, foreseen); });  // autograd's thread, on a GPU
    backward.join();
    between(items);
    if (chance(8)) {  // a step left out: the next one may find its rows moved before the last gradient was noted as landed
      const std::vector<int32_t> all = every();
      return check(hytrain_discard(engine_, all.data(), static_cast<int>(all.size())));
    }
    commit(items, doubtful, skips);
    look();
  }

  void finish() {
    ended_ = true;
    other_.join();
    catch_up();
    std::vector<int32_t> all = every();
    check(hytrain_drain(engine_, all.data(), static_cast<int>(all.size())));
    for (TrainedRow& row : rows_) compare_states(row);
    std::printf("gradients on their way before their rows' updates had ended %lld; parameters of updates that were put on the lane at once %lld, "
                "before their gradients had come %lld\n",
                static_cast<long long>(ahead_), static_cast<long long>(at_once_), static_cast<long long>(promised_));
    const bool enough = step_ >= 1000 && !few_places_;
    if (enough && promised_ == 0) std::exit((std::fprintf(stderr, "race_driver: no weight was sent before its gradient had come\n"), 1));
    if (enough && ahead_ == 0 && !half_on_host_) std::exit((std::fprintf(stderr, "race_driver: the launching thread never ran ahead\n"), 1));
    GuessCounts counts{};
    check(hytrain_guess_counts(engine_, &counts));
    std::printf("guessed %lld of which wrong %lld, parameters %lld of which again %lld, weights sent ahead %lld\n",
                static_cast<long long>(counts.commits), static_cast<long long>(counts.missed), static_cast<long long>(counts.params),
                static_cast<long long>(counts.redone), static_cast<long long>(counts.sent));
    EarlyCounts early{};
    check(hytrain_early_counts(engine_, &early));
    std::printf("begun before their commit %lld of which wrong %lld, parameters %lld of which again %lld\n", static_cast<long long>(early.commits),
                static_cast<long long>(early.missed), static_cast<long long>(early.params), static_cast<long long>(early.redone));
  }

 private:
  bool chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  Floats normal(int64_t n, float scale) {
    Floats values(static_cast<size_t>(n));
    for (float& value : values) value = scale * (static_cast<float>(random_() % 2001) / 1000.0f - 1.0f);
    return values;
  }
  std::vector<int32_t> every() const {
    std::vector<int32_t> all;
    for (size_t r = 0; r < rows_.size(); ++r) all.push_back(static_cast<int32_t>(r));
    return all;
  }

  void add(int number) {
    TrainedRow row;
    const int64_t sizes[] = {2 * kChunk + 3 * kGranule + 7, kChunk, kGranule + 1, 5};
    row.n = sizes[random_() % 4];
    row.copied = number % 4 == 3;
    row.dtype = row.grad_dtype = row.copied ? Dtype::kBF16 : static_cast<Dtype>(number % 4);
    row.unit = number / 4;
    row.state_width = number % 3 == 1 ? 2 : kWideState;
    const std::vector<char> zeros(static_cast<size_t>(row.n * row.state_width));
    row.reference = {normal(row.n, 1), zeros, zeros};
    row.weight = narrowed(row.reference.master, row.dtype);
    rows_.push_back(std::move(row));
    TrainedRow& kept = rows_.back();
    RowSpec spec{kept.n, kept.unit, static_cast<int32_t>(kept.copied ? Dtype::kF32 : kept.dtype), kept.weight.data()};
    check(hytrain_add_row(engine_, &spec));
    if (kept.copied) check(hytrain_use_copy(engine_, number, kept.weight.data()));
    place(number, static_cast<Where>(random_() % 3));
  }

  // New memory, as a move in the library has; the old is freed at once.
  void place(int number, Where where) {
    TrainedRow& row = rows_[number];
    if (row.dtype == Dtype::kF16 && !half_on_host_) where = kDevice;
    row.where = where;
    row.m = row.reference.m;
    row.v = row.reference.v;
    Floats master = row.reference.master;
    std::vector<char> slot(row.n * row.slot_width() + 64);  // so that no two seem to be neighbours in one slab
    std::vector<char> out(row.apart() ? row.n * 2 : 0);
    if (row.split()) {
      row.high.resize(row.n);
      row.low.resize(row.n);
      Floats v = wide(row, row.v), marked(v.size());
      detail::split_master(master.data(), v.data(), row.high.data(), row.low.data(), marked.data(), row.n);
      row.v = row.state_width == kWideState ? narrowed(marked, Dtype::kF32) : narrowed(marked, Dtype::kBF16);
    }
    HostStates host{row.split() ? static_cast<void*>(row.high.data()) : master.data(), row.split() ? row.low.data() : nullptr,
                    row.states(row.m, row.v), slot.data(), row.apart() ? out.data() : nullptr, 1};
    if (where == kHost) {
      check(hytrain_place_on_host(engine_, number, &host));
    } else if (where == kStreamed) {
      host.slot = nullptr;
      row.sends_weight = chance(50);
      check(hytrain_send_weight(engine_, number, row.sends_weight));
      check(hytrain_place_streamed(engine_, number, &host));
    } else {
      float* at = row.dtype == Dtype::kF32 ? reinterpret_cast<float*>(row.weight.data()) : master.data();
      DeviceStates device{at, row.states(row.m, row.v)};
      check(hytrain_place_on_device(engine_, number, &device));
    }
    row.master = std::move(master);
    row.slot = std::move(slot);
    row.out = std::move(out);
  }

  void* stream() { return runs_ahead_ ? &compute_ : nullptr; }

  // On the compute stream.
  template <class Work>
  void compute(Work work) {
    if (!runs_ahead_) return work();
    compute_.enqueue([this, work] {
      compute_.delay();
      work();
    });
  }

  void catch_up() {
    auto reached = std::make_shared<CpuEvent>();
    compute_.enqueue([reached] { reached->fire(); });
    reached->sync();
  }

  void move() {
    catch_up();  // it reads the memory that is given back here
    std::vector<int32_t> all = every();
    check(hytrain_drain(engine_, all.data(), static_cast<int>(all.size())));
    check(hytrain_discard(engine_, all.data(), static_cast<int>(all.size())));  // gradients that no commit has taken
    if (chance(40)) move_ring();
    for (int number = 0; number < static_cast<int>(rows_.size()); ++number) {
      compare_states(rows_[number]);
      if (chance(40)) place(number, static_cast<Where>(random_() % 3));
      if (chance(5)) check(hytrain_set_unit(engine_, number, rows_[number].unit = static_cast<int>(random_() % 3)));
      if (chance(5) && !(rows_[number].where == kDevice && rows_[number].dtype == Dtype::kF32)) {
        std::vector<char> other = rows_[number].weight;
        check(hytrain_set_weight(engine_, number, other.data()));
        rows_[number].weight = std::move(other);
      }
    }
  }

  void move_ring() {
    std::vector<char> other(kLeastRing * (1 + random_() % 3));
    check(hytrain_set_ring(engine_, other.data(), other.size()));
    ring_.swap(other);
  }

  void delays() {
    for (int stage = 0; stage < kStages; ++stage) check(hytrain_set_delay(engine_, stage, chance(70) ? 0.0 : static_cast<double>(random_() % (chance(10) ? 5000 : 300))));
  }

  std::vector<int> taking_part() {
    std::vector<int> rows;
    if (chance(40)) absent_ = chance(60) ? static_cast<int>(random_() % 3) : -1;  // else as in the step before: its update may take several
    for (int r = 0; r < static_cast<int>(rows_.size()); ++r) {
      if (rows_[r].unit != absent_ && !chance(3)) rows.push_back(r);
    }
    return rows;
  }

  std::vector<int32_t> of_unit(const std::vector<int>& rows, int unit) const {
    std::vector<int32_t> found;
    for (int r : rows) {
      if (rows_[r].unit == unit) found.push_back(r);
    }
    return found;
  }

  void wait(const std::vector<int32_t>& rows) {
    if (rows.empty()) return;
    check(hytrain_wait(engine_, rows.data(), static_cast<int>(rows.size()), stream()));
    read(rows);
  }

  // The compute stream reads the weights that the last commit has made: after wait(), and until
  // release().
  void read(const std::vector<int32_t>& rows) {
    for (int32_t r : rows) {
      const std::vector<char>* const weight = &rows_[r].weight;
      const std::vector<char> expected = narrowed(rows_[r].reference.master, rows_[r].dtype);
      compute([weight, expected] { compare(*weight, expected, "a weight"); });
    }
  }

  std::vector<CommitItem> prepare(const std::vector<int>& rows, bool infinite) {
    std::vector<CommitItem> items;
    for (int r : rows) {
      TrainedRow& row = rows_[r];
      Floats values = normal(row.n, 0.1f);
      if (infinite && chance(50)) values[random_() % values.size()] = INFINITY;
      if (row.copied) row.grad_dtype = row.where == kHost && chance(50) ? Dtype::kBF16 : Dtype::kF32;
      row.grad = narrowed(values, row.grad_dtype);
      CommitItem item{};
      item.row = r;
      item.at_end = chance(5);
      auto last = std::make_shared<std::vector<char>>(std::move(row.kept));  // given back in the order of the compute stream
      compute([last] {});
      row.kept = std::vector<char>(row.where == kHost ? 0 : row.grad.size(), 2);
      if (row.where != kHost) item.grad = row.kept.data();
      UpdateScalars& s = item.scalars;
      s.rounding_key = static_cast<uint32_t>(row.steps) * 0x9E3779B9u;
      s.decay = 0.999f;
      s.lerp = 0.1f;
      s.beta2 = 0.95f;
      s.one_minus_beta2 = 0.05f;
      s.bias2_sqrt = 1.0f - 1.0f / static_cast<float>(row.steps + 2);
      s.eps = 1e-8f;
      s.neg_step_size = -0.01f;
      items.push_back(item);
    }
    return items;
  }

  // Guesses at the items of the commit to come, now and then wrong ones.
  std::vector<CommitItem> foresee(const std::vector<CommitItem>& items) {
    std::vector<CommitItem> foreseen;
    const bool wrong = chance(10);
    for (CommitItem item : items) {
      if (rows_[item.row].where != kHost || chance(5)) continue;
      if (wrong || chance(2)) item.scalars.neg_step_size = -0.02f;
      foreseen.push_back(item);
    }
    return foreseen;
  }

  // The loop waits for the device, looks at states and gradients, drops the gradient of a row,
  // makes a new one.
  void between(std::vector<CommitItem>& items) {
    if (chance(60)) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 1500));
    if (chance(15)) wait(every());  // an evaluation: it reads the weights of before the step, also while step() is called
    if (chance(8)) {  // weights are read, states stay where they are
      const std::vector<int32_t> all = every();
      check(hytrain_settle(engine_, all.data(), static_cast<int>(all.size())));
    }
    if (chance(8)) {
      const std::vector<int32_t> all = every();
      check(hytrain_drain(engine_, all.data(), static_cast<int>(all.size())));
      for (const CommitItem& item : items) compare_states(rows_[item.row]);
    }
    for (size_t i = 0; i < items.size();) {
      const int32_t r = items[i].row;
      const bool hosted = rows_[r].where == kHost;
      if (hosted && chance(3)) fetch(r);
      if (hosted && chance(2)) {
        offload({r}, false);
        check(hytrain_arm_cpu(engine_, &r, 1));
        check(hytrain_arm_reload(engine_, &r, 1));
      }
      if (hosted && chance(2)) {
        if (chance(50)) check(hytrain_discard(engine_, &r, 1));  // else it is there, but not in the commit
        items.erase(items.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
  }

  // A micro-batch before the one that counts: its gradients come back, each unit's while the unit
  // before it is handled.
  void backward(const std::vector<int>& rows, const std::vector<CommitItem>& foreseen) {
    const bool again = chance(20);
    if (again) one_backward(rows, foreseen, true, false);
    one_backward(rows, foreseen, false, again);
  }

  std::vector<int32_t> hosted_of(const std::vector<int>& rows, int unit) const {
    std::vector<int32_t> hosted;
    for (int32_t r : of_unit(rows, unit)) {
      if (rows_[r].where == kHost) hosted.push_back(r);
    }
    return hosted;
  }

  Fetched fetch_next(const std::vector<int>& rows, int unit) {
    const std::vector<int32_t> hosted = unit < 0 ? std::vector<int32_t>{} : hosted_of(rows, unit);
    return hosted.empty() ? Fetched{} : begin_fetch(hosted);
  }

  void one_backward(const std::vector<int>& rows, const std::vector<CommitItem>& foreseen, bool other, bool again) {
    Fetched back;
    if (again) back = fetch_next(rows, 2);
    std::vector<int32_t> at_the_end;  // as norms, whose readers Inductor may inline into any later kernel
    for (int unit = 2; unit >= 0; --unit) {
      finish_fetch(back, true);
      const std::vector<int32_t> of = of_unit(rows, unit);
      if (of.empty()) {
        if (again) back = fetch_next(rows, unit - 1);
        continue;
      }
      const int n = static_cast<int>(of.size());
      const std::vector<int32_t> hosted = hosted_of(rows, unit);
      if (!other && chance(5) && !hosted.empty()) {  // made, dropped by zero_grad(), made again
        offload(hosted, true);
        check(hytrain_discard(engine_, hosted.data(), static_cast<int>(hosted.size())));
      }
      keep(of, other);
      if (!hosted.empty()) offload(hosted, other);
      if (again) back = fetch_next(rows, unit - 1);
      std::vector<CommitItem> early;
      for (const CommitItem& item : foreseen) {
        if (rows_[item.row].unit == unit) early.push_back(item);
      }
      if (other && chance(70)) early.clear();
      for (const CommitItem& item : early) check(hytrain_commit_early(engine_, &item.row, 1, &item.scalars, chance(50) ? 1 : kWorkers));
      check(hytrain_arm_cpu(engine_, of.data(), n));
      check(hytrain_arm_gpu(engine_, of.data(), n, stream()));
      check(hytrain_arm_reload(engine_, of.data(), n));
      read(of);
      if (!again && chance(5)) continue;  // released by the commit, where no backward before has released it
      std::vector<int32_t> now;
      for (int32_t r : of) (r % 5 == 2 ? at_the_end : now).push_back(r);
      check(hytrain_release(engine_, now.data(), static_cast<int>(now.size()), stream()));
    }
    read(at_the_end);
    check(hytrain_release(engine_, at_the_end.data(), static_cast<int>(at_the_end.size()), stream()));
  }

  // What a graph's own buffers hold, until it uses them again: the gradients of the step, or
  // `other` ones.
  using Buffers = std::shared_ptr<std::vector<std::vector<char>>>;
  Buffers buffers_of(const std::vector<int32_t>& rows, bool other) const {
    auto buffers = std::make_shared<std::vector<std::vector<char>>>();
    for (int32_t r : rows) buffers->push_back(other ? std::vector<char>(rows_[r].grad.size(), 1) : rows_[r].grad);
    return buffers;
  }
  void use_again(const Buffers& buffers) {
    compute([buffers] {
      for (std::vector<char>& buffer : *buffers) std::fill(buffer.begin(), buffer.end(), static_cast<char>(3));
    });
  }
  static std::vector<const void*> addresses(const std::vector<std::vector<char>>& buffers) {
    std::vector<const void*> found;
    for (const std::vector<char>& buffer : buffers) found.push_back(buffer.data());
    return found;
  }

  void keep(const std::vector<int32_t>& rows, bool other) {
    std::vector<int32_t> staying;
    std::vector<void*> kept;
    std::vector<int64_t> bytes;
    for (int32_t r : rows) {
      if (rows_[r].where == kHost) continue;
      staying.push_back(r);
      kept.push_back(rows_[r].kept.data());
      bytes.push_back(static_cast<int64_t>(rows_[r].grad.size()));
    }
    const Buffers buffers = buffers_of(staying, other);
    const std::vector<const void*> grads = addresses(*buffers);
    check(hytrain_keep_grads(engine_, kept.data(), grads.data(), bytes.data(), static_cast<int>(kept.size()), stream()));
    use_again(buffers);
  }

  void offload(const std::vector<int32_t>& rows, bool other) {
    for (int32_t r : rows) {
      if (rows_[r].copied) check(hytrain_set_gradient_dtype(engine_, r, static_cast<int>(rows_[r].grad_dtype)));
    }
    const Buffers buffers = buffers_of(rows, other);
    const std::vector<const void*> grads = addresses(*buffers);
    check(hytrain_grad_offload(engine_, rows.data(), grads.data(), static_cast<int>(rows.size()), stream()));
    use_again(buffers);
  }

  // A loss scale was too large: the gradients are infinite somewhere, and the step does not count.
  // Its number is known before the next commit.
  void settle() {
    int skipped = 0;
    if (in_doubt_) check(hytrain_skipped(engine_, &skipped));
    if (in_doubt_ && skipped != skips_) std::exit((std::fprintf(stderr, "race_driver: a step was left out or not, wrongly\n"), 1));
    in_doubt_ = false;
  }

  void commit(std::vector<CommitItem>& items, bool doubtful, bool skips) {
    settle();
    float* slots = nullptr;
    check(hytrain_factor_slots(engine_, &slots));
    const bool late = chance(60);
    if (chance(10)) clip_ = 1.0f / static_cast<float>(1 + random_() % 4);
    float* const factor = &factors_[2 * step_ % factors_.size()];  // and whether the step is left out
    factor[0] = clip_;
    factor[1] = skips ? 1.0f : 0.0f;
    const void* sources[] = {late ? factor : nullptr, factor + 1};
    if (!late) slots[0] = clip_;
    for (CommitItem& item : items) {
      const bool scaled = rows_[item.row].where == kHost;
      if (scaled) {
        if (chance(3)) fetch(item.row);
        item.n_factors = 1;
      }
      if (!skips) update(item, scaled);
    }
    check(hytrain_commit(engine_, items.data(), static_cast<int>(items.size()), sources, doubtful ? 2 : 1, doubtful ? 1 : -1, stream()));
    in_doubt_ = doubtful;
    skips_ = skips;
    ++step_;
    for (const CommitItem& item : items) {  // a gradient stays in its slot
      if (rows_[item.row].where == kHost && chance(3)) fetch(item.row);
    }
  }

  void update(const CommitItem& item, bool scaled) {
    TrainedRow& row = rows_[item.row];
    UpdateScalars scalars = item.scalars;
    scalars.factor_count = scaled ? 1 : 0;
    scalars.factors[0] = clip_;
    if (row.copied) scalars.flags |= kWideFactors;
    Reference& r = row.reference;
    update_chunk(row.grad.data(), row.grad_dtype, r.master.data(), row.states(r.m, r.v), nullptr, row.dtype, row.n, scalars);
    ++row.steps;
  }

  void fetch(int r) {
    Fetched back = begin_fetch({r});
    finish_fetch(back, false);
  }

  Fetched begin_fetch(const std::vector<int32_t>& rows) {
    Fetched back{rows, {}};
    size_t bytes = 0;
    for (int32_t r : rows) bytes += (rows_[r].grad.size() + 63) / 64 * 64;
    back.memory.resize(bytes);
    const int n = static_cast<int>(rows.size());
    check(hytrain_fetch(engine_, rows.data(), n, back.memory.data(), static_cast<int64_t>(bytes), stream(), &back.number));
    return back;
  }
  void finish_fetch(Fetched& back, bool other) {  // `other`: they were made by offload(..., true)
    if (back.rows.empty()) return;
    check(hytrain_fetched(engine_, back.number, stream()));
    catch_up();
    size_t begin = 0;
    for (int32_t r : back.rows) {
      const std::vector<char>& grad = rows_[r].grad;
      const auto from = back.memory.begin() + static_cast<std::ptrdiff_t>(begin);
      compare(std::vector<char>(from, from + static_cast<std::ptrdiff_t>(grad.size())), other ? std::vector<char>(grad.size(), 1) : grad, "a gradient");
      begin += (grad.size() + 63) / 64 * 64;
    }
    back.rows.clear();
  }

  void look() {
    if (chance(10)) {
      int taken = 0;
      check(hytrain_take_records(engine_, records_.data(), kRecords, &taken));
    }
    const int r = static_cast<int>(random_() % rows_.size());
    double us = 0;
    int pending = 0;
    if (chance(10)) check(hytrain_cpu_update_us(engine_, r, &us));
    if (chance(10)) check(hytrain_pending(engine_, r, &pending));
    FinishTimes times{};
    check(hytrain_finish_times(engine_, &times));
    ahead_ += times.ahead;
    at_once_ += times.at_once;
    promised_ += times.promised;
  }

  // The second thread: whatever it asks for, the steps of the first stay as they are.
  void look_from_elsewhere(unsigned seed) {
    std::mt19937 random(seed);
    std::vector<TaskRecord> records(64);
    while (!ended_) {
      const int32_t row = static_cast<int32_t>(random() % rows_.size());
      const bool all = random() % 4 == 0;
      const std::vector<int32_t> rows = all ? every() : std::vector<int32_t>{row};
      const int n = static_cast<int>(rows.size());
      int found = 0;
      double us = 0;
      FinishTimes times{};
      GuessCounts guesses{};
      EarlyCounts early{};
      switch (random() % 8) {
        case 0:
        case 1: check(hytrain_settle(engine_, rows.data(), n)); break;
        case 2:
        case 3: check(hytrain_drain(engine_, rows.data(), n)); break;
        case 4: check(hytrain_pending(engine_, row, &found)); break;
        case 5: check(hytrain_take_records(engine_, records.data(), static_cast<int>(records.size()), &found)); break;
        case 6: check(hytrain_cpu_update_us(engine_, row, &us)); break;
        default:
          check(hytrain_finish_times(engine_, &times));
          check(hytrain_guess_counts(engine_, &guesses));
          check(hytrain_early_counts(engine_, &early));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    }
  }

  void compare_states(const TrainedRow& row) const {
    const Reference& r = row.reference;
    compare(row.weight, narrowed(r.master, row.dtype), "a weight");
    Floats master = row.master, v = wide(row, row.v);
    Halves high = row.high;
    if (row.split() && row.where == kStreamed && !row.sends_weight) std::memcpy(high.data(), row.weight.data(), row.weight.size());
    if (row.split()) detail::join_master(high.data(), row.low.data(), wide(row, row.v).data(), master.data(), v.data(), row.n);
    if (!(row.where == kDevice && row.dtype == Dtype::kF32)) compare(master, r.master, "a master");
    compare(row.m, r.m, "m");
    compare(v, wide(row, r.v), "v");
  }

  template <class T>
  static void compare(const std::vector<T>& found, const std::vector<T>& expected, const char* what) {
    if (std::memcmp(found.data(), expected.data(), expected.size() * sizeof(T)) == 0) return;
    std::fprintf(stderr, "race_driver: %s differs from the reference\n", what);
    std::exit(1);
  }

  std::mt19937 random_;
  const bool half_on_host_;  // fp16 rows there keep the launching thread from running ahead
  const bool few_places_;    // on the lane: too few for the rest of a step, so hardly anything is sent or launched before its turn
  static constexpr size_t kLeastRing = 2 * 4 * (kChunk + 1024);
  std::vector<char> ring_ = std::vector<char>(kLeastRing);
  Floats slots_ = Floats(2 * kFactorCapacity);
  Floats staging_ = Floats(kStagingSlots * 3 * kChunk);
  std::vector<char> shadow_ = std::vector<char>(kShadowSlots * kShadowArrays * (4 * kGranule + kShadowApartBytes));
  std::vector<TaskRecord> records_ = std::vector<TaskRecord>(kRecords);
  Floats factors_ = Floats(64);  // as a caching allocator: not handed out again while one may be read
  float clip_ = 1.0f;
  int absent_ = -1;
  bool scales_ = true, speculates_ = true, in_doubt_ = false, skips_ = false;
  size_t step_ = 0;
  int64_t ahead_ = 0, at_once_ = 0, promised_ = 0;
  std::deque<TrainedRow> rows_;
  bool runs_ahead_ = false;
  WorkQueue compute_;
  Engine* engine_ = nullptr;
  std::atomic<bool> ended_{false};
  std::thread other_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: race_driver STEPS SEED\n");
    return 2;
  }
  const int steps = std::atoi(arguments[1]);
  Run run(static_cast<unsigned>(std::atoi(arguments[2])));
  for (int step = 0; step < steps; ++step) run.step();
  run.finish();
  std::printf("%d steps, every bit as the reference's\n", steps);
  return 0;
}
