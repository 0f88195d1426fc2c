// Tensors on the wire: a table in the message's body, and their bytes as pieces beside it.
//
//   table   u32 tensors, then each: u8 flags, and if it is defined u8 dtype, u8 dims, i64 sizes, i64 strides where it
//           is dense in another order than row by row, u8 place where its device has one, and where it has elements
//           u32 piece, u64 offset in it in bytes
//   piece   a range of a storage that tensors of this message cover. Tensors that overlap share it, so what aliased at
//           the sender aliases at the receiver; a view comes without the rest of its storage.
//
// What arrives: the same dtype, sizes and, if it was dense (each element of its range once, in any order of the
// dimensions), strides; others are made contiguous, and then alias nothing. Always a leaf that asks for a gradient if
// the sender's did. Not for sparse, quantized, nested and meta tensors: InvalidArgument, before anything is changed.
//
// Devices: both sides have lists of devices that belong together (devices.h), and the table has places in them. A
// tensor of the CPU without a place arrives on the CPU; one of another device must have one. Bytes of other devices are
// copied to the CPU's memory and from there, each piece once (staging.h).
//
// A piece is `unique`, so that a transport may give its memory away, only if all of this holds: no tensor, view, saved
// variable or weak reference outside the list has the storage; the memory belongs to the storage (it came from the
// storage's allocator, or in a message; a deleter of from_blob may keep what others see); and no other piece is of it.
// One that was copied from another device is.
//
// Received pieces with an owner become the tensors' memory, in place, where their address suits the dtype; others are
// copied. Such a tensor can be resized: it moves to memory of libtorch's own.
//
// Errors of reading: Corrupt, for every number that does not fit. Nothing is allocated on the word of a table; its
// lengths are held against the bytes and the pieces that are there. Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <span>
#include <string>
#include <vector>

#include "base/wire.h"
#include "muster/base/error.h"
#include "transport/transport.h"

namespace muster::rpc::detail {

// This side's devices, by place.
using Places = std::span<const c10::Device>;

// Of write_tensors(), before it has changed anything: a tensor is on a device without a place.
struct WithoutPlace : InvalidArgument {
  WithoutPlace(size_t tensor, c10::Device device);
  size_t tensor;  // which
};

// Appends the table to `body` and the pieces to `pieces`, and leaves `tensors` empty: their storages belong to the
// pieces' owners. Reads nothing of the elements unless it must copy.
void write_tensors(std::vector<at::Tensor>& tensors, std::string& body, std::vector<transport::Piece>& pieces,
                   Places places = {});

// Reads a table; takes the owners of those pieces that it refers to.
std::vector<at::Tensor> read_tensors(WireReader& body, std::vector<transport::Piece>& pieces, Places places = {});

}  // namespace muster::rpc::detail
