// Anchors in host memory, of weights on the fake device. Included by device_streams.cpp.
#pragma once

#include <optional>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>

#include "device_streams/device_weights.h"
#include "fake_device/fake_device_torch.h"
#include "op/outer/anchored_weights.h"

namespace bagua::fake {

inline Tensors some_weights(at::Device device, double scale) {
  Tensors weights;
  for (const int64_t rows : {30, 1, 7}) {
    at::Tensor x = at::arange(rows * 50, at::kFloat).view({rows, 50}).mul(scale).to(at::kBFloat16);
    weights.push_back(x.to(device).t());  // not contiguous
  }
  return weights;
}

inline Tensors on_host(const Tensors& tensors, at::ScalarType dtype) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.cpu().to(dtype).clone());
  return copies;
}

// Two rounds between which an optimizer trains; the second one arrives late. The weights, the
// deltas and the copies at the launch of both.
inline Tensors outer_rounds(at::Device device, std::optional<double> alpha) {
  Tensors weights = some_weights(device, 0.37);
  const Tensors anchors = on_host(some_weights(device, 0.11), at::kFloat);
  Tensors deltas = on_host(weights, at::kFloat), launched = on_host(weights, at::kBFloat16);
  Tensors seen;
  const auto remember = [&seen](const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) seen.push_back(tensor.cpu().clone());
  };
  for (const bool late : {false, true}) {
    for (at::Tensor& x : weights) x.mul_(1.25);
    take_deltas(weights, anchors, deltas, launched);
    remember(deltas);
    remember(launched);
    for (at::Tensor& x : weights) x.add_(1);
    if (late) {
      merge_anchors(weights, anchors, launched, alpha);
    } else {
      take_anchors(weights, anchors);
    }
    for (at::Tensor& x : weights) x.mul_(0.5);
    remember(weights);
  }
  return seen;
}

inline void anchors_may_stay_on_the_host(at::Device device) {
  for (const std::optional<double> alpha : {std::optional<double>(), std::optional(0.25)}) {
    const Tensors expected = outer_rounds(at::kCPU, alpha), found = outer_rounds(device, alpha);
    for (size_t i = 0; i < expected.size(); ++i) {
      expect(found[i].equal(expected[i]), "host anchors: tensor ", i, " is not the CPU's");
    }
    expect_no_race("anchors on the host");
  }
}

// One wait for all weights that are copied down, none for those that are copied up.
inline void hosts_wait_once_for_weights(at::Device device) {
  Tensors weights = some_weights(device, 0.37);
  const Tensors anchors = on_host(weights, at::kFloat);
  Tensors deltas = on_host(weights, at::kFloat), launched = on_host(weights, at::kBFloat16);
  const auto waits_of = [&](auto pass) {
    for (at::Tensor& x : weights) x.mul_(1.25);
    Device::instance().fall_behind();
    for (at::Tensor& x : weights) x.add_(1);
    pass();
    return Device::instance().host_waits();
  };
  expect(waits_of([&] { take_deltas(weights, anchors, deltas, launched); }) == 1, "take_deltas");
  expect(Device::instance().has_copied_host_memory(current_stream()), "weights were read early");
  expect(waits_of([&] { take_anchors(weights, anchors); }) == 0, "take_anchors waits");
  expect(waits_of([&] { merge_anchors(weights, anchors, launched, {}); }) == 1, "merge_anchors");
  synchronize(device);
}

}  // namespace bagua::fake
