#include "streamed_visits.h"

namespace hytrain_fx {

void StreamedVisits::begin(Row& row, const CommitItem& item, const EventPtr& end, const float* skip) {
  row.begin_update(item, state_.commits);
  row.streamed.grad = item.grad;
  row.streamed.skip = skip;
  if (item.at_end || !row.ready || skip) {
    row.ready = end;
    row.open_at(end, state_.marks);
  }
  row.issued = row.streamed.chunks = 0;
  state_.streaming.insert(row.key(0));
}

// Where no row may be updated, take the one that may be first. Updates run in the order in which
// their states are sent. One that waits for the end of the backward, such as a norm's, would hold
// up all others.
int StreamedVisits::next(bool& ready) const {
  const Row* first = nullptr;
  for (const Key& key : state_.streaming) {
    const Row& row = state_.row(key);
    ready = row.open->known_done();
    if (ready) return key.row;
    if (!first || row.open_mark < first->open_mark) first = &row;
  }
  return first ? first->index : -1;
}

StreamedVisits::Arrays StreamedVisits::arrays_of(const HostStates& host) {
  Arrays arrays{host.low ? Array{host.low, 2} : Array{host.master, 4}};
  for (int s = 0; s < kMaxStates; ++s) arrays[1 + s] = {host.states.at[s], host.states.width};
  return arrays;
}

InFlight StreamedVisits::send(const Upload& upload, EngineLock& lock) {
  // its phase is PENDING: nobody else changes what is read here
  Row& row = state_.rows[upload.row];
  const Chunk& chunk = row.chunks[upload.chunk];
  if (++row.streamed.chunks == row.size()) state_.streaming.erase(row.key(0));
  const uint64_t before = upload.slot->visit;
  staging_.begin_visit(*upload.slot);
  const bool recording = state_.records.on();
  int64_t bytes = 0;
  for (const auto& [home, width] : arrays_of(row.host)) bytes += home ? chunk.params() * width : 0;
  const bool sends_weight = row.host.low && row.streamed.sends_weight;
  lock.unlock();
  const Lanes lanes = visit(row, upload, before, sends_weight, recording);
  lock.lock();
  upload.slot->stored = lanes.out;
  if (recording) {
    state_.records.note_lane(kStatesIn, upload.row, upload.chunk, lanes.in_begin, lanes.in);
    state_.records.note_lane(kDeviceUpdate, upload.row, upload.chunk, lanes.update_begin, lanes.updated);
    state_.records.note_lane(kStatesOut, upload.row, upload.chunk, lanes.out_begin, lanes.out);
  }
  row.give_weight(lanes.updated);
  state_.clock.streamed(state_.device->now_us());
  ++row.issued;
  if (row.is_issued()) {
    row.streamed.stored = lanes.out;
    row.streamed.visit = upload.slot->visit;
    state_.notify_issued(row);
  }
  return {lanes.in, bytes, nullptr};
}

// Visits come home in the order in which they are sent: a wait for one is a wait for all before it.
void StreamedVisits::await_home(const EventPtr& stored, uint64_t visit) {
  if (visit <= home_) return;
  state_.device->wait(Lane::H2D, stored);
  home_ = visit;
}

// Without the lock. `before`: the slot's last visit.
StreamedVisits::Lanes StreamedVisits::visit(const Row& row, const Upload& upload, uint64_t before, bool sends_weight, bool recording) {
  Device& device = *state_.device;
  const Chunk& chunk = row.chunks[upload.chunk];
  const HostStates& host = row.host;
  const Arrays arrays = arrays_of(host);
  const std::array<float*, 1 + kMaxStates>& at = upload.slot->at;
  States states = host.states.from(chunk.begin);
  for (int s = 0; s < kMaxStates; ++s) states.at[s] = states.at[s] ? at[1 + s] : nullptr;
  const int64_t n = chunk.params(), weight_width = row.weight_bytes(), grad_width = bytes_of(row.device_grad_dtype());
  void* const weight = offset(row.spec.weight, chunk.begin * weight_width);
  auto record = [&](Lane lane) { return recording ? device.record(lane) : nullptr; };
  Lanes lanes;

  await_home(upload.slot->stored, before);
  await_home(row.streamed.stored, row.streamed.visit);  // the last step's
  lanes.in_begin = record(Lane::H2D);
  for (size_t a = 0; a < arrays.size(); ++a) {
    const auto& [home, width] = arrays[a];
    if (home) device.copy(Lane::H2D, at[a], offset(home, chunk.begin * width), n * width);
  }
  lanes.in = device.record_shown(Lane::H2D);

  for (const EventPtr& event : {lanes.in, row.ready, row.released}) device.wait(Lane::STREAM_UPDATE, event);
  lanes.update_begin = record(Lane::STREAM_UPDATE);
  device.update(Lane::STREAM_UPDATE,
                {{offset(row.streamed.grad, chunk.begin * grad_width), row.device_grad_dtype(), row.weight_dtype(),
                  host.low ? nullptr : at[0], host.low ? reinterpret_cast<uint16_t*>(at[0]) : nullptr, states, weight, n,
                  row.scalars, row.streamed.skip}});
  lanes.updated = device.record(Lane::STREAM_UPDATE);

  device.wait(Lane::STREAM_OUT, lanes.updated);
  lanes.out_begin = record(Lane::STREAM_OUT);
  for (size_t a = 0; a < arrays.size(); ++a) {
    const auto& [home, width] = arrays[a];
    if (home) device.copy(Lane::STREAM_OUT, offset(home, chunk.begin * width), at[a], n * width);
  }
  if (sends_weight) device.copy(Lane::STREAM_OUT, offset(host.master, chunk.begin * weight_width), weight, n * weight_width);
  lanes.out = device.record(Lane::STREAM_OUT);
  return lanes;
}

}  // namespace hytrain_fx
