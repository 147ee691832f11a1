// Greedy decoding in C++: runs a package of ../export_aoti.py without Python and prints the tokens of each step.
//
//   decode PACKAGE.pt2 STEPS TOKEN...      one sequence per first token
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

// Zeroed caches, stored head by head, for a package that takes them as inputs; none for one that holds its own.
std::vector<at::Tensor> new_caches(const std::unordered_map<std::string, std::string>& metadata) {
  const auto size = [&](const char* name) { return std::stol(metadata.at(name)); };
  std::vector<at::Tensor> caches;
  for (long i = 0; i < size("num_cache_inputs"); ++i)
    caches.push_back(
        at::zeros({size("num_blocks"), size("num_kv_heads"), size("block_size"), size("head_size")}).transpose(1, 2));
  return caches;
}

int run(const std::string& package, int64_t steps, const std::vector<int64_t>& first_tokens) {
  const c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader model(package);
  const auto metadata = model.get_metadata();
  const auto caches = new_caches(metadata);

  // block 0 stays free: every sequence owns blocks_per_sequence blocks from 1 on
  const auto batch = static_cast<int64_t>(first_tokens.size());
  const auto blocks_per_sequence = std::stol(metadata.at("blocks_per_sequence"));
  const auto block_table = at::arange(1, 1 + batch * blocks_per_sequence).view({batch, blocks_per_sequence});
  at::Tensor tokens = at::tensor(first_tokens);
  for (int64_t position = 0; position < steps; ++position) {
    std::vector<at::Tensor> inputs = {tokens, at::full({batch}, position, at::kLong), block_table};
    inputs.insert(inputs.end(), caches.begin(), caches.end());
    tokens = model.run(inputs).at(0);
    for (int64_t i = 0; i < batch; ++i) std::cout << tokens[i].item<int64_t>() << (i + 1 < batch ? ' ' : '\n');
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: decode PACKAGE.pt2 STEPS TOKEN...\n";
    return 2;
  }
  std::vector<int64_t> first_tokens;
  for (int i = 3; i < argc; ++i) first_tokens.push_back(std::stoll(argv[i]));
  try {
    return run(argv[1], std::stoll(argv[2]), first_tokens);
  } catch (const std::exception& error) {
    std::cerr << argv[1] << ": " << error.what() << '\n';
    return 1;
  }
}
