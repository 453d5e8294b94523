use lily_engine::testing::request;

use super::*;

#[test]
fn answers_differ_in_their_seeds_and_share_their_prompt() {
    let mut one = request(vec![1, 2, 3]);
    one.sampling.seed = Some(7);
    let all = answers(one, 3);
    let seeds: Vec<_> = all.iter().filter_map(|request| request.sampling.seed).collect();
    assert_eq!((all.len(), seeds[0]), (3, 7));
    assert!(seeds[1] != seeds[0] && seeds[2] != seeds[0] && seeds[1] != seeds[2]);
    assert!(all.iter().all(|request| request.boundaries == [2]), "the last token is read by each");
    assert!(answers(request(vec![1]), 2).iter().all(|request| request.sampling.seed.is_none()));
    assert!(answers(request(vec![1, 2]), 1)[0].boundaries.is_empty());
}
