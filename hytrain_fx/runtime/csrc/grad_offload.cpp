#include "grad_offload.h"

namespace hytrain_fx {
namespace {

// Bytes of gradients in one copy: few enough copies that no stream's queue fills up and blocks the
// launching thread.
constexpr int64_t kCopyBytes = 32 << 20;

}  // namespace

std::vector<Part> GradOffload::begin(const int32_t* rows, const void* const* grads, int n) {
  std::vector<Part> parts;
  for (int i = 0; i < n; ++i) begin_row(state_.row(rows[i]), grads[i], parts);
  return parts;
}

void GradOffload::begin_row(Row& row, const void* grad, std::vector<Part>& parts) {
  if (!row.on_host()) throw std::logic_error(row.name() + " offloads a gradient but is not placed on the host");
  if (row.phase == Phase::PENDING) {
    throw std::runtime_error(row.name() + " has a new gradient while its last update is in flight: its wait node did not run");
  }
  ++row.generation;
  row.armed = 0;
  if (row.has_passed()) {
    row.phase = Phase::NEXT_GRAD;
    state_.clock.ran_ahead();
  } else {
    row.phase = Phase::GRAD;
    row.begin_chunks();
  }
  const int64_t size = row.slot_grad_bytes();
  for (int c = 0; c < row.size(); ++c) {
    const Chunk& chunk = row.chunks[c];
    parts.push_back({row.index, c, row.generation, offset(grad, chunk.begin * size), offset(row.host.slot, chunk.begin * size),
                     chunk.params() * size});
  }
}

// A unit goes as one piece where it fits. Each piece takes five places or more in the compute
// stream's queue, and a full queue blocks the launching thread.
void GradOffload::copy(const std::vector<Part>& parts, void* stream) {
  int64_t all = 0;
  for (const Part& part : parts) all += padded(part.bytes);
  const auto most = static_cast<int64_t>(all <= static_cast<int64_t>(ring_.largest()) ? ring_.largest() : ring_.half());
  for (size_t first = 0; first < parts.size();) {
    size_t last = first;
    int64_t bytes = 0;
    while (last < parts.size() && (last == first || bytes + padded(parts[last].bytes) <= most)) {
      bytes += padded(parts[last++].bytes);
    }
    copy_piece(parts, first, last, stream);
    first = last;
  }
}

// One piece of the ring: gathered on the compute stream, and copied from there to the slots, in as
// few copies as their addresses allow.
void GradOffload::copy_piece(const std::vector<Part>& parts, size_t first, size_t last, void* stream) {
  Device& device = *state_.device;
  std::vector<int64_t> at(last - first + 1, 0);
  for (size_t i = first; i < last; ++i) at[i - first + 1] = at[i - first] + padded(parts[i].bytes);
  char* piece = static_cast<char*>(ring_.take(at.back(), device, stream));
  std::vector<DeviceCopy> copies;
  for (size_t i = first; i < last; ++i) copies.push_back({piece + at[i - first], parts[i].source, parts[i].bytes});
  device.gather(stream, copies);
  device.wait(Lane::D2H, device.record_compute(stream));
  std::vector<GradLanding> landings;
  for (size_t begin = first; begin < last;) {
    size_t end = begin + 1;  // slots of a unit stand one after the other, padded as the ring is
    while (end < last && parts[end].slot == parts[end - 1].slot + padded(parts[end - 1].bytes) &&
           at[end + 1 - first] - at[begin - first] <= kCopyBytes) {
      ++end;
    }
    EventPtr before = state_.records.on() ? device.record(Lane::D2H) : nullptr;
    const int64_t bytes = at[end - 1 - first] - at[begin - first] + parts[end - 1].bytes;
    device.copy(Lane::D2H, parts[begin].slot, piece + at[begin - first], bytes);
    landings.push_back({before, device.record_shown(Lane::D2H), {parts.begin() + begin, parts.begin() + end}});
    begin = end;
  }
  ring_.free_after(landings.back().event);
  std::lock_guard lock(state_.mutex);
  lander_.expect(landings);
}

void GradOffload::keep(void* const* kept, const void* const* grads, const int64_t* bytes, int n, void* stream) {
  std::vector<DeviceCopy> copies;
  for (int i = 0; i < n; ++i) {
    if (bytes[i] > 0) copies.push_back({kept[i], grads[i], bytes[i]});
  }
  state_.device->gather(stream, copies);
}

}  // namespace hytrain_fx
