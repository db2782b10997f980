// Bindings of a step of decoding. Addresses and sizes are what the Python side has checked; a plan holds addresses of
// tensors that its owner keeps.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "decode.h"

namespace nb = nanobind;

void bind_decode(nb::module_& m) {
  m.attr("most_sequences") = arb::kMostSequences;

  nb::class_<arb::Norm>(m, "Norm")
      .def(nb::init<>())
      .def("__init__",
           [](arb::Norm* self, float eps, Address gain, int dtype) {
             new (self) arb::Norm{true, eps, at<const void>(gain), static_cast<arb::Dtype>(dtype), false, {}};
           })
      .def("__init__", [](arb::Norm* self, float eps, Address packed, Address exponent, int64_t columns,
                          int64_t groups, int64_t group_size) {
        new (self) arb::Norm{true,  eps, nullptr, arb::Dtype::float32, true,
                             weight_of(packed, exponent, 1, columns, groups, group_size)};
      });

  nb::class_<arb::Projection>(m, "Projection")
      .def(nb::init<>())
      .def("__init__", [](arb::Projection* self, Address packed, Address exponent, int64_t rows, int64_t columns,
                          int64_t groups, int64_t group_size, Address factor, bool by_rows) {
        new (self) arb::Projection{weight_of(packed, exponent, rows, columns, groups, group_size),
                                   at<const float>(factor), by_rows};
      });

  nb::class_<arb::DecodeLayer>(m, "DecodeLayer")
      .def(nb::init<>())
      .def_rw("attention_norm", &arb::DecodeLayer::attention_norm)
      .def_rw("query_norm", &arb::DecodeLayer::query_norm)
      .def_rw("key_norm", &arb::DecodeLayer::key_norm)
      .def_rw("output_norm", &arb::DecodeLayer::output_norm)
      .def_rw("feed_norm", &arb::DecodeLayer::feed_norm)
      .def_rw("hidden_norm", &arb::DecodeLayer::hidden_norm)
      .def_rw("query", &arb::DecodeLayer::query)
      .def_rw("key", &arb::DecodeLayer::key)
      .def_rw("value", &arb::DecodeLayer::value)
      .def_rw("output", &arb::DecodeLayer::output)
      .def_rw("gate", &arb::DecodeLayer::gate)
      .def_rw("up", &arb::DecodeLayer::up)
      .def_rw("down", &arb::DecodeLayer::down)
      .def_rw("residual_scale", &arb::DecodeLayer::residual_scale);

  nb::class_<arb::DecodePlan>(m, "DecodePlan")
      .def("__init__",
           [](arb::DecodePlan* self, int64_t width, int64_t heads, int64_t key_heads, int64_t features, int64_t hidden,
              int64_t vocabulary, int activation, const std::vector<double>& speeds) {
             new (self) arb::DecodePlan{};
             self->width = width;
             self->heads = heads;
             self->key_heads = key_heads;
             self->features = features;
             self->hidden = hidden;
             self->vocabulary = vocabulary;
             self->activation = static_cast<arb::Activation>(activation);
             self->speeds = speeds;
           })
      .def("set_embedding",
           [](arb::DecodePlan& self, Address rows, int dtype) {
             self.float_embedding = at<const void>(rows);
             self.embedding_dtype = static_cast<arb::Dtype>(dtype);
           })
      .def("set_ternary_embedding",
           [](arb::DecodePlan& self, const arb::Projection& table) { self.ternary_embedding = table.weight; })
      .def("add_layer", [](arb::DecodePlan& self, const arb::DecodeLayer& layer) { self.layers.push_back(layer); })
      .def_rw("final_norm", &arb::DecodePlan::final_norm)
      .def_rw("head", &arb::DecodePlan::head)
      .def_rw("logit_scale", &arb::DecodePlan::logit_scale)
      .def(
          "step",
          [](const arb::DecodePlan& self, int isa, int threads, int64_t batch, Address ids, double position,
             Address cache, int kept, int64_t capacity, int64_t slot, int64_t past, Address out, int dtype) {
            return arb::decode_step(isa, threads, self, batch, at<const int64_t>(ids), position,
                                    {at<const int64_t>(cache), static_cast<arb::Kept>(kept), capacity, slot, past},
                                    at<void>(out), static_cast<arb::Dtype>(dtype));
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "rows",
          [](const arb::DecodePlan& self, int isa, int threads, const std::array<Address, 8>& tokens,
             const std::array<Address, 6>& cache, int kept, Address out, int dtype) {
            const auto count = [](Address size) { return static_cast<int64_t>(size); };
            const auto [rows, ids, sequences, slots, pasts, positions, wanted_count, wanted] = tokens;
            const auto [addresses, blocks, size, tables, table_count, table_width] = cache;
            return arb::decode_rows(
                isa, threads, self,
                {count(rows), at<const int64_t>(ids), at<const int64_t>(sequences), at<const int64_t>(slots),
                 at<const int64_t>(pasts), at<const double>(positions), count(wanted_count), at<const int64_t>(wanted)},
                {at<const int64_t>(addresses), static_cast<arb::Kept>(kept), count(blocks), count(size),
                 at<const int64_t>(tables), count(table_count), count(table_width)},
                at<void>(out), static_cast<arb::Dtype>(dtype));
          },
          nb::call_guard<nb::gil_scoped_release>());
}
