;; The smallest module: lets every request pass. World request-filter.
(module
  (memory (export "memory") 2)
  (global $top (mut i32) (i32.const 1024))
  ;; The gateway asks for room for what it hands over.
  (func (export "cabi_realloc") (param $old i32) (param $old-size i32) (param $align i32) (param $size i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and
      (i32.add (global.get $top) (i32.sub (local.get $align) (i32.const 1)))
      (i32.sub (i32.const 0) (local.get $align))))
    (global.set $top (i32.add (local.get $at) (local.get $size)))
    (block $enough (loop $more
      (br_if $enough (i32.le_u (global.get $top) (i32.mul (memory.size) (i32.const 65536))))
      (if (i32.eq (memory.grow (i32.const 1)) (i32.const -1)) (then unreachable))
      (br $more)))
    (local.get $at))
  ;; Answers 0 at address 0: continue.
  (func (export "branchline:middleware/on-request@1.0.0#handle") (param i32) (result i32)
    (i32.store8 (i32.const 0) (i32.const 0))
    (i32.const 0)))
