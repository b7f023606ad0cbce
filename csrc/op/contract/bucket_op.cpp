#include "op/contract/bucket_op.h"

#include "base/check.h"

namespace bagua {

void check_rows(const at::Tensor& gradient, at::IntArrayRef sizes, const at::Tensor& like,
                const std::string& parameter) {
  BAGUA_CHECK(gradient.layout() == at::kSparse, "the gradient of '", parameter,
              "' is dense, although its embedding has sparse=True: something besides the embedding "
              "uses the weight, such as a tied layer or a penalty. Pass sparse=False.");
  BAGUA_CHECK(gradient.sparse_dim() == 1, "the gradient of '", parameter, "' has ",
              gradient.sparse_dim(),
              " sparse dimensions; whole rows, of one sparse dimension, can be communicated.");
  BAGUA_CHECK(gradient.scalar_type() == like.scalar_type() && gradient.sizes() == sizes &&
                  gradient.device() == like.device(),
              "the gradient of '", parameter, "' is ", gradient.toString(), gradient.sizes(),
              " on ", gradient.device().str(), ", its parameter was ", like.toString(), sizes,
              " on ", like.device().str(), ". Wrap the model again after changing it.");
}

}  // namespace bagua
