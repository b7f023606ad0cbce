#include "op/sharded/compressed_all_gather.h"

#include <utility>
#include <vector>

#include <ATen/record_function.h>

#include "base/check.h"
#include "op/wire/bucket_parts.h"

namespace bagua {

CompressedAllGather::CompressedAllGather(std::shared_ptr<Communicator> communicator,
                                         std::shared_ptr<const Codec> codec,
                                         std::shared_ptr<Scratch> scratch, Checksum checksum)
    : exchange_(std::move(communicator), checksum),
      codec_(std::move(codec)),
      scratch_(std::move(scratch)) {}

void CompressedAllGather::run(at::Tensor& flat, const Round& round) {
  const Group group = exchange_.group();
  check_divides(flat, group, round);
  if (group.size == 1) return;
  const at::Tensor values = codec_values(flat, *scratch_);
  const BucketParts parts = cut(values, group, *codec_, *scratch_);
  exchange_.begin(round, codec_->frames());
  // 1.
  {
    RECORD_FUNCTION("bagua::encode", {});
    for_tiles(flat.device(), 0, parts.layout(group.rank).tiles(), [&](int64_t first, int64_t end) {
      const std::vector<Chunk> own =
          own_chunks(parts, parts.part(group.rank), parts.send, group.rank, first, end);
      parts.calls.encode(own);
      parts.calls.decode(own);
    });
  }
  // 2.
  gather(exchange_, parts, round);
  if (!values.is_same(flat)) flat.copy_(values);
}

std::string CompressedAllGather::describe() const {
  return concat("CompressedAllGather(", codec_->name(), ", ranks ", exchange_.group().size,
                checksum_text(exchange_.checksum()), ")");
}

}  // namespace bagua
