#include "codec/factory.h"

#include "base/check.h"
#include "codec/chunk_codec_cpu.h"
#include "codec/codecs.h"
#include "codec/cuda/chunk_codec_cuda.h"

namespace bagua {

std::shared_ptr<const Codec> make_codec(const std::string& name, Processor processor) {
  std::shared_ptr<const Codec> codec =
      processor == Processor::kCpu ? make_cpu_codec(name) : make_cuda_codec(name);
  if (codec) return codec;
  std::string known;
  for (const std::string& each : codec_names()) known += (known.empty() ? "" : ", ") + each;
  throw std::invalid_argument(concat("unknown codec '", name, "'; there are: ", known));
}

std::vector<std::string> codec_names() {
  std::vector<std::string> names;
  for_each_codec([&](const auto& line) { names.emplace_back(line.name); });
  return names;
}

}  // namespace bagua
