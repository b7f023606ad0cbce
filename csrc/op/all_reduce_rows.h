// The exact sum or mean of sparse gradients of embeddings.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"
#include "ledger/scratch.h"
#include "op/contract/bucket_op.h"

namespace bagua {

// Steps, for P ranks:
//   1. this rank's rows, divided by P for the mean; those of one index are added;
//   2. all_gather of the numbers of rows;
//   3. all_gather of indices and values, padded to the largest number;
//   4. what all ranks sent, in order of ranks; rows of one index are added.
// Every rank adds the same bytes in the same order and holds the same bits afterwards. A rank
// without gradient has no rows. Rows are divided first, as in torch's DistributedDataParallel: the
// results are equal, and half precision overflows no earlier.
//
// The bucket's memory determines dtype and device and has no other use. On CPU it is NaN afterwards
// if the result holds NaN or infinity, else zero, which the lane looks at; on a device it stays.
// The host waits for the device, since it needs sizes and indices.
//
// May fail: Error for a gradient of another kind, MismatchError, naming the peer, for numbers and
// indices that cannot be. Bytes sent per rank: (P - 1)(8 + n (8 + R)), each term of the inner sum
// rounded up to 16, for R bytes a row and n rows, those of the rank that has most.
class AllReduceRows final : public BucketOp {
 public:
  // `sizes`: of the parameter, of which the first dimension counts the rows.
  AllReduceRows(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
                std::shared_ptr<SparseGradient> gradient, std::vector<int64_t> sizes, ReduceOp op);
  void run(at::Tensor& flat, const Round& round) override;
  std::string describe() const override;

 private:
  at::Tensor own_rows(const at::Tensor& like, const Round& round);
  std::vector<int64_t> gather_numbers(const at::Tensor& own, const Round& round);
  at::Tensor exchange(const at::Tensor& own, const std::vector<int64_t>& numbers,
                      const Round& round);
  at::Tensor are_valid(const at::Tensor& indices) const;
  void check_indices(const at::Tensor& valid, const std::vector<int64_t>& sources,
                     const Round& round) const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Scratch> scratch_;
  std::shared_ptr<SparseGradient> gradient_;
  std::vector<int64_t> sizes_;
  int64_t row_numel_ = 1;
  ReduceOp op_;
};

}  // namespace bagua
