# cmake -DDUNLIN=... -DWORK=... [-DLIBRARY=libdunlin-cuda.so] -P bench.cmake: see tests/cmake/tests_bench_command.cmake.
file(MAKE_DIRECTORY ${WORK})
file(WRITE ${WORK}/kimi.json [[{"model_type": "kimi_k2", "num_hidden_layers": 4, "hidden_size": 256,
 "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 4096, "num_attention_heads": 4,
 "rms_norm_eps": 1e-6, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
 "v_head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
 "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
 "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "hidden_act": "silu",
 "rope_theta": 50000.0}]])
file(WRITE ${WORK}/llama.json [[{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256,
 "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 4096, "num_attention_heads": 4,
 "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}]])

# run(CODE LINES WORDS...): `dunlin bench WORDS` must end with CODE and leave LINES of CSV (0: none is looked at). What
# it has said is then in `said`.
function(run code lines)
  file(REMOVE ${WORK}/out.csv)
  execute_process(COMMAND ${DUNLIN} bench ${ARGN} RESULT_VARIABLE is OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT is EQUAL code)
    message(FATAL_ERROR "bench ${ARGN}: ended with ${is}, not ${code}\n${out}\n${err}")
  endif()
  set(said "${out}${err}" PARENT_SCOPE)
  if(lines)
    file(STRINGS ${WORK}/out.csv row)
    list(LENGTH row n)
    if(NOT n EQUAL lines)
      message(FATAL_ERROR "bench ${ARGN}: ${n} lines of CSV, not ${lines}\n${out}")
    endif()
    list(GET row 0 head)
    string(REGEX MATCHALL "," commas "${head}")
    list(LENGTH commas want)
    foreach(line IN LISTS row)
      string(REGEX MATCHALL "," commas "${line}")
      list(LENGTH commas n)
      if(NOT n EQUAL want OR line MATCHES "nan|inf")
        message(FATAL_ERROR "bench ${ARGN}: bad line \"${line}\"")
      endif()
    endforeach()
  endif()
endfunction()

set(csv --device cpu --csv ${WORK}/out.csv)
run(0 61 decode --synthetic ${WORK}/kimi.json --layers 2 --weights int4,fp8,bf16 --kv bf16,fp8,mixed --integrity off,tag
  --batch 1,3 --context 17,100 --rounds 1 --ms 1 ${csv})
run(0 3 decode --synthetic ${WORK}/llama.json --kv bf16,fp8 --batch 2 --context 64 --rounds 2 --ms 1 ${csv})
run(0 3 prefill --synthetic ${WORK}/kimi.json --layers 2 --kv bf16,fp8 --context 100 --chunk 48 --rounds 1 --ms 1 ${csv})
# Lines: the head; 7 matmuls in 3 formats, router, head, 2 grouped, 5 of rows, 3 of sampling, 3 a KV format, experts: 40;
# without what only Kimi has 25.
run(0 66 kernels --batch 2 --context 64 ${csv})
# refused(CODE SAYS WORDS...): before anything is loaded, and the last run's CSV is as it was.
function(refused code says)
  file(READ ${WORK}/kept.csv before)
  run(${code} 0 ${ARGN})
  if(NOT said MATCHES "${says}" OR said MATCHES "loaded in|can be read at")
    message(FATAL_ERROR "bench ${ARGN}: expected \"${says}\" and nothing loaded:\n${said}")
  endif()
  file(READ ${WORK}/kept.csv after)
  if(NOT after STREQUAL before)
    message(FATAL_ERROR "bench ${ARGN}: has changed its CSV")
  endif()
endfunction()

file(WRITE ${WORK}/kept.csv "a,b\n1,2\n")
set(kimi --synthetic ${WORK}/kimi.json --device cpu --csv ${WORK}/kept.csv)
refused(2 "expected MODEL" decode --device cpu)
refused(2 "num_hidden_layers|layers" decode ${kimi} --layers 9)
refused(2 "--layers 0: expected" decode ${kimi} --layers 0)
refused(2 "--kv fp9: expected" decode ${kimi} --kv fp9)
refused(2 "--kv mixed: .*a --batch of 2" decode ${kimi} --kv mixed --batch 1)
refused(2 "--kv mixed: .*prefill" prefill ${kimi} --kv mixed)
refused(2 "--weights int8: expected int4" decode ${kimi} --weights int4,int8)
refused(2 "--context 1048576: the model has a context of 4096" decode ${kimi} --context 1k,1M)
refused(1 "/none/x.csv: No such file" decode --synthetic ${WORK}/kimi.json --device cpu --csv /none/x.csv)
refused(1 "/none/x.csv: No such file" kernels --device cpu --csv /none/x.csv)
refused(2 "--shapes none: expected" kernels --shapes small-mla,none --device cpu --csv ${WORK}/kept.csv)
refused(2 "--filter nothing: expected a part of matmul, " kernels --filter nothing --device cpu --csv ${WORK}/kept.csv)
refused(2 "--filter experts: expected a part of matmul, attention" kernels --filter experts --shapes small-gqa --device cpu)
refused(1 "missing.json" decode --synthetic ${WORK}/missing.json --device cpu)
refused(2 "--csv: expected FILE" ${WORK}/none.gguf --csv)
refused(2 "--csv takes a FILE" --csv ${WORK}/kept.csv)
refused(2 "--integrity on: expected off and tag" ${WORK}/none.gguf --integrity on)
refused(2 "--batch 65: expected" ${WORK}/none.gguf --batch 65)
refused(1 "/none/x.csv: No such file" ${WORK}/none.gguf --csv /none/x.csv)

# A backend is asked for its sizes before it is opened: also where no GPU is.
if(LIBRARY)
  set(ENV{DN_CUDA_LIBRARY} ${LIBRARY})
  refused(2 "qk_rope_head_dim. of 32: the CUDA backend" decode --synthetic ${WORK}/kimi.json --device cuda)
  refused(2 "qk_rope_head_dim. of 32: the CUDA backend" kernels --shapes small-mla --device cuda)
endif()

# Default contexts that the model does not have are left out, and so is "mixed" of one sequence.
run(0 4 decode --synthetic ${WORK}/llama.json --kv bf16,mixed --batch 1,2 --rounds 1 --ms 1 ${csv})
if(NOT said MATCHES "batch of 1 is bf16" OR NOT said MATCHES "context 8192 left out: the model has 4096")
  message(FATAL_ERROR "bench decode: not said what was left out:\n${said}")
endif()

# Stopped by its time limit it writes what it has measured: 50 rounds of eight rows of 50 ms would take 20 s.
file(REMOVE ${WORK}/out.csv)
execute_process(COMMAND timeout 5 ${DUNLIN} bench decode --synthetic ${WORK}/llama.json --batch 15,16 --context 4k --kv bf16,fp8
  --integrity off,tag --rounds 50 --ms 50 ${csv} RESULT_VARIABLE is OUTPUT_VARIABLE out ERROR_VARIABLE err)
file(STRINGS ${WORK}/out.csv row)
list(LENGTH row n)
if(is EQUAL 0 OR n LESS 2 OR NOT err MATCHES "stopped by a signal")
  message(FATAL_ERROR "bench decode, stopped after 5 s: ended with ${is}, ${n} lines of CSV\n${out}\n${err}")
endif()
