"""Short made-up stories and talk about them, drawn from plots written for this project (CC0).

A plot is a list of beats, a beat a list of wordings, and {slots} are filled from the cast. A small model learns from
them how a story hangs together; the books of the corpus give it the breadth of the language."""
import random

ANIMALS = """fox rabbit bear wolf hare mouse squirrel owl crow hedgehog badger otter beaver deer goat sheep lamb pig cow horse donkey cat kitten dog puppy
hen duck goose swan sparrow robin eagle hawk stork frog toad turtle tortoise snail bee ant spider butterfly lion tiger elephant monkey giraffe zebra camel
crocodile parrot penguin seal whale dolphin fish crab rat mole bat lizard snake raven pony fawn cub chick duckling panda kangaroo""".split()
PEOPLE = ["boy", "girl", "king", "queen", "prince", "princess", "farmer", "fisherman", "miller", "baker", "sailor", "shepherd", "tailor", "knight", "wizard", "witch",
          "old man", "old woman", "gardener", "painter", "teacher", "doctor", "hunter", "woodcutter", "soldier", "pirate", "captain", "clockmaker", "musician", "child"]
OTHERS = ["dragon", "giant", "fairy", "ghost", "robot", "snowman", "mermaid", "elf", "dwarf", "unicorn", "goblin", "troll", "little train", "little boat", "teapot", "scarecrow",
          "star", "cloud", "tree", "lantern", "doll", "kite", "bell", "lighthouse", "toy soldier", "raindrop"]
SHE = {"girl", "queen", "princess", "witch", "old woman", "fairy", "mermaid", "hen", "cow", "doll"}
HE = {"boy", "king", "prince", "fisherman", "wizard", "old man", "knight", "snowman", "toy soldier"}
NAMES_SHE = "Ruby Lily Rosa Anna Clara Ella Ivy Mabel Nora Penny Sophie Tilly Wren Hazel Daisy Flora Greta Holly Iris Juno Kitty Luna Molly Olive Poppy Stella Violet Willa Maya Emma".split()
NAMES_HE = "Felix Oscar Rufus Toby Max Leo Finn Hugo Jasper Milo Ned Otto Pip Robin Sam Theo Barnaby Casper Dexter Ernest Freddie George Henry Jack Kit Rusty Bruno Archie Tom Ben".split()
TRAITS = ["little", "young", "clever", "brave", "shy", "curious", "kind", "lonely", "proud", "lazy", "cheerful", "gentle", "hungry", "old", "tiny", "merry", "quiet", "busy"]
PLACES = ["at the edge of a great forest", "in a small village by the sea", "near a quiet river", "on a green hill", "in a deep valley", "beside a wide lake", "in an old stone house",
          "under the roots of a tall oak tree", "in a little cottage by the road", "on a small island", "at the foot of a high mountain", "in a sunny meadow", "behind an old mill",
          "not far from the king's castle", "in a busy town", "at the end of a long lane"]
WILD = ["the forest", "the hills", "the dark wood", "the mountains", "the marsh", "the meadow", "the valley", "the old garden"]
FOODS = ["apples", "berries", "bread", "honey cakes", "nuts", "cherries", "soup", "cheese", "pears", "carrots", "plums", "pancakes"]
FEARS = ["the dark", "deep water", "thunder", "high places", "the wind", "strangers", "the old bridge", "loud noises"]
MAKES = ["a boat", "a house", "a bridge", "a kite", "a clock", "a garden", "a cart", "a wall", "a nest", "a tower", "a swing", "a raft"]
THINGS = ["a golden key", "an old map", "a silver bell", "a small wooden box", "a shining stone", "a red ribbon", "a lost letter", "a broken lantern", "a blue feather", "a little brass ring"]
SEEDS = ["a seed", "an acorn", "a bean", "a bulb", "a nut", "an apple seed"]
SEASONS = ["spring", "summer", "autumn", "winter"]
HELPERS = ANIMALS + ["old woman", "old man", "fisherman", "shepherd", "miller", "girl", "boy", "farmer"]

OPEN = ["Once upon a time there was {a_kind} named {name} who lived {place}.", "Once there was {a_kind} called {name}. {He} lived {place}.",
        "There was once {a_kind} who lived {place}. {His} name was {name}.", "A long time ago, {a_kind} named {name} lived {place}.",
        "{name} was {a_kind} who lived {place}.", "{Place}, there lived {a_kind} named {name}.", "Long ago there lived {a_kind} whose name was {name}. {His} home was {place}."]
CLOSE = ["And from that day on, {name} and the {helper} were the best of friends.", "{name} never forgot that day.", "And they all lived happily ever after.",
         "That night {name} slept soundly and dreamed sweet dreams.", "And if {name} has not moved away, {he} lives there still.", "The {helper} smiled, and so did {name}.",
         "Everyone {around} still tells the story of {name} and the {helper}.", "And {name} was happy for many years."]

# plot name: (theme words, lesson, beats)
PLOTS = {
    "lost": (["being lost", "the way home", "courage"], "to ask for help when {he} needs it", [
        ["One {season} morning {he} followed a bright butterfly into {wild}.", "One day {he} went into {wild} to look for {food}.", "One afternoon {he} walked into {wild} to see what was on the other side.",
         "{He} loved to explore, and one day {he} went farther into {wild} than ever before."],
        ["{He} went on and on, and did not look back.", "{He} looked at the flowers and the stones, and forgot to watch the path.", "The path turned left and right, and soon {he} could not see {his} home any more."],
        ["When the sun went down, {name} saw that {he} was lost.", "Then it grew dark, and {name} did not know which way to go.", "At last {he} stopped and looked around. Nothing was familiar. {name} was lost."],
        ["{He} sat down under a tree and began to cry.", "{He} called out, but only the wind answered.", "\"Oh dear,\" said {name}, \"how shall I ever get home?\""],
        ["Just then {a_helper} came by. \"Why are you so sad?\" asked the {helper}.", "{A_helper} heard {him} and came closer. \"What is the matter?\" {hhe} asked.",
         "After a while {a_helper} came down the path with a small light. \"Who is there?\" said the {helper}."],
        ["\"I have lost my way,\" said {name}. \"Will you help me?\"", "\"I cannot find my home,\" said {name} in a small voice.", "{name} told {hhim} everything."],
        ["\"Do not be afraid,\" said the {helper}. \"I know every path here. Follow me.\"", "\"I know where you live,\" said the {helper}. \"Come, I will show you the way.\"",
         "\"That is easy,\" said the {helper}. \"We only have to follow the stream.\""],
        ["So they walked together under the stars until they saw the lights of home.", "They walked side by side, and before long {name} saw {his} own front door.", "Step by step they went on, and at last they came to the right place."],
        ["\"Thank you,\" said {name}, and gave the {helper} some {food}.", "{name} was so glad that {he} hugged the {helper}.", "{name} thanked the {helper} a hundred times."]]),
    "share": (["sharing", "kindness", "{food}"], "that food tastes better when it is shared", [
        ["One day {he} found a whole basket of {food}.", "All {season} long {he} had gathered {food}, until {his} house was full.", "One morning {he} came home with more {food} than {he} could carry."],
        ["\"These are all mine,\" {he} said. \"I will not give any away.\"", "\"I will keep every one of them for myself,\" thought {name}.", "{He} shut the door so that nobody could see the {food}."],
        ["That evening there was a knock at the door. It was {a_helper}, cold and hungry.", "Soon {a_helper} came along the road. {HHe} had not eaten for two days.", "Then {a_helper} knocked and asked for a little to eat."],
        ["\"Please,\" said the {helper}, \"could you spare a few of your {food}?\"", "\"I smell {food},\" said the {helper}. \"May I have just a little?\""],
        ["At first {name} said no, and the {helper} went sadly away.", "{name} shook {his} head and closed the door.", "\"I have nothing for you,\" said {name}, though it was not true."],
        ["But when {he} sat down to eat, the {food} did not taste good at all.", "But {name} could not sleep. {He} thought of the hungry {helper} out in the cold.", "But {he} felt a heavy stone in {his} heart."],
        ["So {he} ran out and called the {helper} back.", "At last {he} got up, took the basket, and went to find the {helper}.", "{He} jumped up and ran down the road. \"Come back!\" {he} cried."],
        ["They sat by the fire and ate together, and told each other stories until midnight.", "They shared all the {food}, and there was enough for both.", "Together they ate and laughed, and {name} thought that {he} had never had a better meal."]]),
    "fear": (["courage", "being afraid", "bravery"], "that being brave means doing what is right even when one is afraid", [
        ["{name} was afraid of {fear}.", "There was one thing that {name} feared more than anything else, and that was {fear}.", "Everyone knew that {name} was afraid of {fear}."],
        ["The others laughed and said, \"What a coward you are!\"", "The others often made fun of {him}.", "{He} was ashamed of it and told nobody."],
        ["One night {a_helper} fell into trouble and cried for help.", "One {season} day there was a terrible cry. {A_helper} was in danger!", "Then one evening {his} friend the {helper} did not come home."],
        ["{name} ran to the place, but there, between {him} and the {helper}, was {fear}.", "To help the {helper}, {he} would have to face {fear}.", "There was only one way to reach the {helper}, and it led straight to {fear}."],
        ["{His} heart beat fast and {his} knees shook.", "{He} stopped. {He} wanted to run away and hide.", "\"I cannot do it,\" {he} whispered."],
        ["But then {he} thought of the {helper}, all alone. \"I must try,\" said {name}.", "\"If I do not go, nobody will,\" {he} said to {himself}.", "Then {he} took a deep breath, and then another, and went on."],
        ["Slowly, one step after another, {he} went forward, and it was not half as bad as {he} had thought.", "{He} closed {his} eyes for a moment, and then {he} did it.", "{He} sang a little song to keep up {his} courage, and before it was over {he} was there."],
        ["{He} took the {helper} by the hand and brought {hhim} safely home.", "Together they came back, tired but safe.", "\"You came!\" cried the {helper}. \"You are the bravest friend in the world.\""],
        ["After that nobody laughed at {name} any more.", "Since then {name} is not so afraid of {fear}.", "\"I was afraid the whole time,\" said {name}. \"That is what makes it brave,\" said the {helper}."]]),
    "make": (["building {make}", "hard work", "trying again"], "never to give up", [
        ["{He} had one great wish. {He} wanted to build {make}.", "One day {he} said, \"I am going to build {make}.\"", "More than anything {name} wanted to make {make} with {his} own hands."],
        ["{He} worked all day long, but in the evening everything fell down.", "{He} began at once, but the wood was too weak and it broke.", "The first try was a failure. It fell to pieces in a moment."],
        ["The next day {he} tried again, and again it fell down.", "{He} tried a second time with stones, but they were too heavy.", "{He} started over. This time it held for an hour, and then it broke as well."],
        ["\"I shall never do it,\" said {name}, and sat down on the ground.", "\"Perhaps I should give up,\" {he} sighed.", "{He} was so tired and sad that {he} threw {his} tools into the grass."],
        ["{A_helper} had been watching from far away. \"You work too fast,\" {hhe} said.", "Then {a_helper} came by and looked at the pieces. \"You are nearly there,\" said the {helper}.", "\"May I give you some advice?\" asked {a_helper} who was passing by."],
        ["\"Begin with the part below, and make it strong. The rest will follow.\"", "\"First think, then measure, and only then begin,\" said the {helper}.", "\"Two can lift what one cannot. Let me help you.\""],
        ["So they worked together, slowly and carefully, for three days.", "{name} listened, and began once more from the beginning.", "All through the {season} they worked side by side."],
        ["And on the last day it stood there, strong and beautiful.", "And this time it did not fall. It was the finest thing that anyone had ever seen.", "At last it was done, and everybody came to look."],
        ["\"I could not have done it without you,\" said {name}.", "{name} was very proud, and thanked the {helper} with all {his} heart.", "\"You did it,\" said the {helper}. \"You did not give up.\""]]),
    "trick": (["cleverness", "being clever", "a trick"], "that a clever head is better than strong arms", [
        ["One day a hungry {foe} caught {him} by the tail of {his} coat.", "One {season} day {he} met a great {foe} on the path.", "One evening a fierce {foe} stood before {his} door."],
        ["\"Now I will eat you,\" said the {foe}.", "\"I am hungry,\" growled the {foe}, \"and you will be my supper.\"", "\"You are just what I was looking for,\" said the {foe} with a wicked smile."],
        ["{name} was frightened, but {he} did not show it.", "{name} thought quickly.", "\"Very well,\" said {name} calmly, though {his} heart was beating."],
        ["\"What a pity,\" {he} said. \"I am so thin. But I know where there is a much better supper.\"", "\"You may eat me,\" said {name}, \"but first let me tell you that a much bigger {foe} lives in that well.\"",
         "\"Everyone says that you have a beautiful voice,\" said {name}. \"Will you sing for me before I die?\""],
        ["The {foe} was as vain as {fhe} was strong, and {fhe} let go of {name} at once.", "The {foe} was greedy and wanted to see it.", "The {foe} forgot {fhis} hunger for a moment and opened {fhis} paws."],
        ["That was all that {name} needed. {He} ran away as fast as the wind.", "In that moment {name} slipped away and hid in a narrow hole.", "Before the {foe} knew what had happened, {name} was far away."],
        ["The {foe} ran after {him}, but fell straight into the pond.", "\"Come back!\" roared the {foe}, but it was too late.", "The {foe} looked for {him} everywhere, and went home hungry."],
        ["When {he} told the {helper} about it, they both laughed until they cried.", "The {helper}, who had seen it all, said, \"That was well done.\"", "\"How did you get away?\" asked the {helper}. \"I used my head,\" said {name}."]]),
    "treasure": (["a treasure", "{thing}", "a secret"], "that a friend is the greatest treasure of all", [
        ["One day {he} found {thing} in the grass.", "One rainy afternoon {he} found {thing} under the floor.", "While {he} was digging in the garden, {name} found {thing}."],
        ["\"Where does it come from?\" {he} wondered.", "\"This must belong to somebody,\" said {name}.", "{He} turned it over and over. There were strange signs on it."],
        ["{He} asked {a_helper}, who knew many old tales. \"It leads to a treasure,\" said the {helper}.", "{He} showed it to {a_helper}. \"I have seen this before,\" said the {helper}. \"It comes from {wild}.\""],
        ["So the two of them set out together early the next morning.", "\"Then let us look for it together,\" said {name}, and off they went.", "They packed some {food} and started at sunrise."],
        ["They crossed a river, climbed a hill, and slept under the open sky.", "The way was long. When {name} was tired, the {helper} told {him} stories. When the {helper} was tired, {name} sang.", "It rained, and the wind blew, but they did not turn back."],
        ["At last they came to a hollow tree, and inside there was an old chest.", "On the third day they came to a cave, and in the cave stood a chest.", "At the end of the path they found a little door in the rock."],
        ["They opened it. There was nothing inside but a piece of paper.", "But it was empty, except for a few words that somebody had carved long ago.", "Inside there was no gold at all, only a letter."],
        ["It said: \"Look who is standing beside you.\"", "On it was written: \"The best treasure is the one who came with you.\"", "{name} read it aloud: \"Whoever comes here together has already found the treasure.\""],
        ["{name} looked at the {helper}, and both began to laugh.", "Then they went home, and they were not sad in the least.", "\"It is true,\" said {name}, and took the {helper} by the hand."]]),
    "race": (["a race", "being proud", "patience"], "that slow and steady wins in the end", [
        ["{name} could not run fast, and the others laughed at {him}.", "{name} was slow, but {he} never stopped halfway.", "\"You are the slowest creature in the land,\" said the {foe} to {name}."],
        ["One day the {foe} said, \"I am faster than all of you. Who will race me?\"", "The {foe} was proud and boasted every day. \"Nobody can beat me,\" {fhe} said."],
        ["\"I will,\" said {name}.", "\"Let us have a race,\" said {name}, and everybody was surprised.", "Nobody answered. Then {name} stepped forward."],
        ["They agreed to run to the old mill and back, and the {helper} was to be the judge.", "The {helper} drew a line in the sand. \"To the big stone and back,\" {hhe} said. \"One, two, three, go!\""],
        ["The {foe} was soon far ahead.", "The {foe} shot away like an arrow.", "In a moment the {foe} was out of sight."],
        ["\"I have plenty of time,\" thought the {foe}, and lay down for a nap in the shade.", "On the way {fhe} stopped to eat some {food}, and then to look at {fhis} own face in the water."],
        ["{name} went on, step by step, and did not stop once.", "But {name} kept going, slowly and quietly, past the trees and over the hill."],
        ["When the {foe} woke up, {name} was already at the line.", "The {foe} ran as {fhe} had never run before, but it was too late. {name} had won."],
        ["Everybody cheered.", "The {foe} hung {fhis} head and never boasted again.", "\"How is it possible?\" cried the {foe}. \"You were faster,\" said {name}, \"but I did not stop.\""]]),
    "promise": (["a promise", "honesty", "keeping one's word"], "to keep {his} promises", [
        ["{His} neighbour was {a_helper}, and one day the {helper} had to go away.", "One {season} {a_helper} who lived next door was ill."],
        ["\"Will you water my flowers?\" asked the {helper}. \"I promise,\" said {name}.", "\"Please feed my birds while I am gone,\" said the {helper}. \"You can trust me,\" said {name}."],
        ["On the first day {name} did as {he} had promised. On the second day {he} went swimming instead.", "But the weather was fine, and {name} went out to play and forgot all about it.", "But there was a fair in the town, and {name} thought, \"I can do it tomorrow.\""],
        ["When at last {he} remembered, it was nearly too late.", "A week later {he} remembered, and {his} heart sank."],
        ["{He} could have told a lie. {He} thought about it for a long time.", "\"What shall I say?\" {he} thought. \"I could say that the wind did it.\""],
        ["But then {he} went to the {helper} and told the truth. \"I forgot, and I am sorry,\" {he} said.", "But a lie would only make it worse. So {he} said, \"I broke my promise. Please forgive me.\""],
        ["The {helper} was silent for a while. \"It was wrong to forget,\" {hhe} said, \"but it was right to tell me.\"", "\"I am sad,\" said the {helper}, \"but I am glad that you told me the truth.\""],
        ["For the rest of the {season} {name} worked in the {helper}'s garden every day.", "Then {name} worked from morning until night until everything was in order again."],
        ["In the end it was more beautiful than before.", "And the next time the {helper} went away, {hhe} gave the key to {name}."]]),
    "stranger": (["a new friend", "a stranger", "friendship"], "not to judge others before {he} knows them", [
        ["One day {a_helper} moved into the empty house across the road.", "One cold {season} evening a stranger came. It was {a_helper}."],
        ["Nobody knew where {hhe} came from, and nobody spoke to {hhim}.", "\"We do not want strangers here,\" said the others, and shut their doors."],
        ["{name} watched the {helper} from the window. {HHe} looked lonely.", "At night {name} could hear the {helper} singing a sad song."],
        ["\"Perhaps {hhe} is dangerous,\" said the neighbours.", "\"Be careful,\" said the others. \"You do not know who that is.\""],
        ["But {name} put some {food} in a basket and went across the road.", "But the next day {name} took some {food} and knocked at the door."],
        ["\"Good morning,\" said {name}. \"I thought that you might be hungry.\"", "The door opened a little. \"Welcome,\" said {name}. \"I live nearby.\""],
        ["The {helper} was so surprised that {hhe} did not know what to say. Then {hhe} smiled.", "\"You are the first who has spoken to me,\" said the {helper}."],
        ["They talked the whole afternoon. The {helper} had seen the whole world and knew wonderful stories.", "The {helper} could play the fiddle and bake and mend shoes, and was glad to teach it all."],
        ["Soon the others came too, one after another, to listen.", "\"Come in, all of you,\" {name} called to the neighbours, and one by one they came."]]),
    "storm": (["a storm", "helping each other", "neighbours"], "that many hands make light work", [
        ["One night in {season} a great storm came over the land.", "One evening the sky turned black and the wind began to howl."],
        ["The rain fell all night, and the wind took the roof of {his} house.", "There was thunder and lightning, and a tree fell on {his} home."],
        ["In the morning everything was wet and broken.", "When it was over, {name} stood in the mud and looked at what was left."],
        ["\"Everything that I had is gone,\" said {name}.", "\"It will take me a year to mend this,\" {he} said, and a tear ran down {his} nose."],
        ["Then {he} saw {a_helper} coming up the path with a hammer.", "\"Good morning,\" said a voice. It was {a_helper}, carrying a long board."],
        ["\"My house stood well,\" said the {helper}. \"So I have time for yours.\"", "\"You helped me last year,\" said the {helper}. \"Now it is my turn.\""],
        ["And behind the {helper} came all the others, with nails and ropes and pots of soup.", "Then more friends came, from the hill and from the river, and everybody brought something."],
        ["They worked and sang, and before the sun went down the house was whole again.", "Some carried, some cut, and some cooked, and in three days it was done."],
        ["It was even better than before, for now it had a window to the south.", "That evening they lit a fire and had a feast."]]),
    "wish": (["a wish", "magic", "being content"], "to be happy with what {he} has", [
        ["{name} was never content. \"I wish I were rich,\" {he} said every day.", "\"If only I were somebody else,\" {name} used to say.", "{name} wanted to be bigger and stronger than everyone else."],
        ["One day {he} saved {a_helper} who was caught in a net.", "One {season} evening {he} gave {his} last {food} to {a_helper}."],
        ["\"I am not what I seem,\" said the {helper}. \"You may have one wish.\"", "\"You have a good heart,\" said the {helper}. \"Tell me what you want, and you shall have it.\""],
        ["\"Then make me as great as a king,\" said {name}.", "\"I want a house of gold,\" said {name} at once."],
        ["There was a flash of light, and it was done.", "The {helper} nodded, and the wish came true."],
        ["For a day {name} was happy. But then {he} grew lonely, for nobody dared to speak to {him}.", "But gold is cold, and {he} could not sleep, and {his} friends did not know {him} any more."],
        ["{He} thought of {his} old home {place}, and of the warm sun in the morning.", "\"I had everything before,\" thought {name}, \"and I did not know it.\""],
        ["So {he} went back to the {helper}. \"Please take it away again,\" {he} begged.", "{He} looked for the {helper} for seven days, and when {he} found {hhim}, {he} asked to be as {he} was before."],
        ["The {helper} laughed kindly, and in a moment {name} was home.", "\"That is the wisest wish of all,\" said the {helper}."]]),
    "gift": (["a gift", "a birthday", "love"], "that the best gifts come from the heart", [
        ["Tomorrow was the birthday of {his} dear friend, the {helper}, and {name} had no gift.", "{name} wanted to give the {helper} something for {hhis} birthday, but {he} had no money at all."],
        ["{He} went to the market, but everything was too dear.", "{He} looked in all the shops, but {his} pockets were empty."],
        ["{He} tried to catch a star in the pond, but it slipped through {his} fingers.", "{He} tried to make {make}, but there was not enough time."],
        ["In {wild} {he} found {thing}, but it belonged to somebody else, and {he} gave it back.", "{He} saw the most beautiful flower, but {he} did not have the heart to pick it."],
        ["In the evening {he} came home with empty hands.", "The sun went down, and {name} still had nothing."],
        ["So {he} sat down and made a song about all the things that they had done together.", "Then {he} took a piece of paper and drew a picture of the two of them."],
        ["The next day the others brought big gifts in shining boxes.", "At the feast there were gifts of silver and silk."],
        ["\"I have only this,\" said {name} quietly.", "{name} came last of all. \"It is very small,\" {he} said."],
        ["The {helper} was silent. Then {hhe} said, \"This is the finest gift that I have ever had.\"", "But the {helper} loved it more than all the rest, and kept it for {hhis} whole life."]]),
    "lie": (["telling the truth", "a lie", "honesty"], "that nobody believes a liar even when he tells the truth", [
        ["{He} liked to play tricks. One day {he} cried, \"Help! A {foe} is coming!\"", "{He} was bored, so one day {he} shouted, \"A {foe}! A {foe}!\""],
        ["Everybody came running, but there was no {foe} at all.", "The {helper} and all the neighbours ran to help, and {name} laughed at them."],
        ["\"That was not funny,\" said the {helper}.", "\"Do not do that again,\" said the {helper}, who was out of breath."],
        ["But the next day {name} did the same, and again they came, and again {he} laughed.", "But {name} thought that it was the best joke in the world, and {he} did it once more."],
        ["Then, one {season} evening, a real {foe} came out of {wild}.", "A week later {he} heard a noise, and there stood a real {foe} with shining teeth."],
        ["\"Help!\" cried {name}. \"A {foe}! This time it is true!\"", "{name} screamed as loud as {he} could."],
        ["But nobody came. \"It is only {name} with the old joke,\" they said.", "The others heard it, but they shook their heads and went on with their work."],
        ["{name} had to climb up a tree, and sat there the whole night in the cold.", "{He} ran and ran, and only just reached {his} door in time. The {foe} ate all the {food} in the garden."],
        ["In the morning {he} went to the {helper} and said, \"I am sorry. I will never lie again.\"", "\"Now you know,\" said the {helper}."]]),
    "song": (["music", "a song", "practice"], "that practice makes perfect", [
        ["{name} wanted to sing, but {his} voice was like an old door.", "There was nothing that {name} loved more than music, but {he} could not play a single note."],
        ["When {he} began, the others covered their ears.", "\"Please stop,\" said the neighbours."],
        ["In {season} there was to be a great feast, and {name} wanted to sing there.", "\"At the next feast I will sing for everybody,\" said {name}."],
        ["{He} went to {a_helper}, who was the best musician in the land. \"Will you teach me?\"", "One day {a_helper} heard {him}. \"You have no skill,\" said the {helper}, \"but you have a song in you. I will teach you.\""],
        ["\"Sing one note,\" said the {helper}, \"and sing it a hundred times.\"", "\"Every day, an hour before breakfast,\" said the {helper}. \"That is the whole secret.\""],
        ["So {name} practised every day, in rain and in sunshine.", "It was hard, and often {name} wanted to stop, but {he} went on."],
        ["On the evening of the feast {he} stood before them all, and {his} knees trembled.", "At last the day came. Everybody looked at {him}, and some were already laughing."],
        ["Then {he} began to sing, and it became quite still.", "{He} closed {his} eyes and sang, and the song went out over the roofs like a bird."],
        ["When it was over, they clapped and called for more.", "Even the oldest of them had tears in their eyes."]]),
    "moon": (["the moon", "a dream", "wisdom"], "that some things are beautiful because they are far away", [
        ["Every night {he} looked at the moon. \"I want to touch it,\" {he} said.", "{name} loved the moon more than anything, and wanted to have it for {his} own."],
        ["First {he} climbed the tallest tree, but the moon was still far away.", "{He} climbed to the top of the hill, but it was not high enough."],
        ["Then {he} built a ladder, but it was too short.", "Then {he} asked the wind to carry {him}, but the wind only laughed."],
        ["One night {he} saw the moon in the pond, round and bright. \"Now I have it!\" {he} cried, and jumped in.", "Then {he} saw it shining in a bucket of water, and put a lid on it. But in the morning the bucket was empty."],
        ["{A_helper} pulled {him} out by the ear.", "{A_helper} saw how sad {he} was and sat down beside {him}."],
        ["\"You foolish {kind_only},\" said the {helper}, \"that was only the light of the moon.\"", "\"Why do you want to have it?\" asked the {helper}."],
        ["\"But I want it near me,\" said {name}.", "\"Because it is so beautiful,\" said {name}."],
        ["\"If it were here, nobody else could see it,\" said the {helper}. \"Up there it shines for all of us.\"", "\"Look,\" said the {helper}. \"It follows you wherever you go. It is near you already.\""],
        ["{name} thought about this for a long time, and then {he} nodded.", "They sat there side by side and looked up until the moon went down."]]),
    "seed": (["a garden", "patience", "{seed}"], "that good things need time", [
        ["One {season} day {he} put {seed} into the ground.", "{A_helper} gave {him} {seed}. \"Take good care of it,\" said the {helper}."],
        ["The next morning {he} ran out to look, but there was nothing to see.", "{He} waited an hour, and then another, but nothing happened."],
        ["\"It is asleep,\" {he} thought, and sang to it.", "{He} watered it and told it stories."],
        ["The {foe} laughed at {him}. \"You are talking to the mud,\" {fhe} said.", "\"Nothing will ever grow there,\" said the {foe}."],
        ["Days passed, and weeks passed, and still there was nothing.", "The rain came, and the sun came, but the earth stayed brown."],
        ["\"Shall I dig it up?\" {name} asked the {helper}. \"Wait,\" said the {helper}. \"Roots grow first, and you cannot see them.\"", "{name} was sad, but the {helper} said, \"Only a little longer.\""],
        ["Then, one morning, there was a tiny green leaf.", "And one day, when {he} had almost given up, something green looked out of the ground."],
        ["It grew and grew, until it was taller than {name}.", "Every day it was a little bigger, and at last it bore flowers as red as the evening sky."],
        ["Now everybody wanted to sit in its shade, even the {foe}.", "And all those who had laughed came to look and were silent."]]),
}
FOES = ["wolf", "fox", "bear", "lion", "tiger", "hawk", "snake", "hare", "cat", "giant", "troll", "crocodile"]
SYLLABLES = "ba be bo da de di do fa fi ga ka ki la le li lo lu ma me mi mo na ne ni no pa pi ra re ri ro sa se si so ta te ti to va vi wi za zo".split()


def a(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def cap(s):
    return s[:1].upper() + s[1:]


def pronouns(prefix, she):
    he, him, his = ("she", "her", "her") if she else ("he", "him", "his")
    return {prefix + "he": he, prefix + "him": him, prefix + "his": his, prefix + "himself": him + "self", prefix.upper() + "He": cap(he), prefix.upper() + "His": cap(his)}


def cast(r, kind=None, name=None):
    kind = kind or r.choice(ANIMALS * 2 + PEOPLE + OTHERS)
    she = kind in SHE or (kind not in HE and r.random() < 0.5)
    if not name:
        name = r.choice(NAMES_SHE if she else NAMES_HE) if r.random() < 0.85 else cap("".join(r.choice(SYLLABLES) for _ in range(r.choice([2, 2, 3]))))
    helper = r.choice([h for h in HELPERS if h != kind])
    foe = r.choice([f for f in FOES if f not in (kind, helper)])
    trait = r.choice(TRAITS) + " " if r.random() < 0.6 and " " not in kind else ""
    place = r.choice(PLACES)
    s = {"kind_only": kind, "kind": trait + kind, "a_kind": a(trait + kind), "name": name, "helper": helper, "a_helper": a(helper), "A_helper": cap(a(helper)), "foe": foe,
         "place": place, "Place": cap(place), "around": r.choice(["in that place", "there", "in the land"]), "wild": r.choice(WILD), "food": r.choice(FOODS),
         "fear": r.choice(FEARS), "make": r.choice(MAKES), "thing": r.choice(THINGS), "seed": r.choice(SEEDS), "season": r.choice(SEASONS)}
    hshe = helper in SHE or (helper not in HE and r.random() < 0.4)
    s.update(pronouns("", she))
    s.update(pronouns("h", hshe))
    s.update(pronouns("f", False))
    return s


def story(r, kind=None, name=None, plot=None):
    """(slots, plot name, text)"""
    s = cast(r, kind, name)
    plot = plot or r.choice(list(PLOTS))
    _, lesson, beats = PLOTS[plot]
    s["lesson"] = lesson.format(**s)
    parts = [r.choice(OPEN)] + [r.choice(b) for b in beats]
    if r.random() < 0.55:
        parts.append(r.choice(["So {name} learned {lesson}.", "From this {name} learned {lesson}.", "And {name} had learned {lesson}."]))
    parts.append(r.choice(CLOSE))
    said = [p.format(**s) for p in parts]
    at = sorted(r.sample(range(2, len(said)), r.choice([1, 2, 2, 3])))
    return s, plot, "\n\n".join(" ".join(said[i:j]) for i, j in zip([0] + at, at + [len(said)]))


def ask(r, s, plot):
    """A request that the story answers, and a thought about it."""
    theme = r.choice(PLOTS[plot][0]).format(**s)
    short = r.choice(["story", "story", "story", "short story", "tale", "bedtime story", "little story", "fairy tale", "fable"])
    tell = r.choice(["Tell me {0}", "Tell me {0}", "Tell me {0}", "Please tell me {0}", "Can you tell me {0}", "Write {0}", "Write me {0}", "I want to hear {0}", "Could you write {0}", "Give me {0}", "Make up {0}", "tell me {0}"])
    k = s["kind_only"]
    about = r.choices([f" about {a(k)}", f" about {a(k)} named {s['name']}", f" about {a(k)} and {a(s['helper'])}", f" about {theme}", "", f" about {a(s['kind'])}", f" about {a(k)} who learns {s['lesson']}", f" with {a(k)} in it"],
                      [12, 3, 2, 3, 1.5, 2, 1, 0.7])[0]
    q = tell.format(a(short)) + about
    q += r.choice(["?", "?", ""]) if q.startswith(("Can", "Could")) else r.choice([".", ".", "", "!"])
    t = r.choice([f"The user wants a {short}{about}. I will tell of {s['name']}, {s['a_kind']}.", f"The user asks for a {short}{about}. I will write about {a(k)} named {s['name']} who learns {s['lesson']}.",
                  f"A {short}{about}. My story will be about {s['name']} and {a(s['helper'])}."])
    return q, t


def questions(s, plot):
    n, k, h = s["name"], s["kind_only"], s["helper"]
    he = s["He"]
    return [(f"What was the name of the {k}?", [f"The name of the {k} was {n}.", f"The {k} was called {n}.", f"{he} was called {n}."], f"The user asks for the name of the {k}. It was {n}."),
            (f"Where did {n} live?", [f"{n} lived {s['place']}.", f"{he} lived {s['place']}."], f"The story says that {n} lived {s['place']}."),
            (f"Who was {n}?", [f"{n} was {s['a_kind']} who lived {s['place']}.", f"{n} was {s['a_kind']}."], f"{n} was {s['a_kind']} in the story."),
            (f"What did {n} learn?", [f"{n} learned {s['lesson']}.", f"{he} learned {s['lesson']}."], f"The lesson of the story is {s['lesson']}."),
            ("What is the moral of the story?", [f"The moral is that one should learn {s['lesson']}." if s["lesson"].startswith(("to", "never", "not")) else f"The moral is {s['lesson']}."], f"The lesson of the story is {s['lesson']}."),
            (f"Who else is in the story?", [f"There is also {a(h)} in the story.", f"The other one in the story is {a(h)}."], f"Beside {n} there is {a(h)}."),
            ("Thank you!", ["You are welcome!", "You are welcome. Would you like to hear another one?", "I am glad that you liked it."], "The user thanks me."),
            ("That was a nice story.", ["Thank you! I am glad that you liked it.", f"Thank you. I like {n} too."], "The user liked the story.")]


def dialogue(r):
    """A story on request, sometimes followed by talk about it or by another story."""
    messages = []
    think = r.random() < 0.4
    for _ in range(r.choice([1, 1, 1, 1, 2])):
        plot = r.choice(list(PLOTS))
        s, plot, text = story(r, plot=plot)
        q, t = ask(r, s, plot)
        if messages:
            q = r.choice([q, f"Tell me another one about {a(s['kind_only'])}.", f"Now tell me a story about {a(s['kind_only'])}."])
        messages += [{"role": "user", "content": q}, {"role": "assistant", "content": text, "reasoning_content": t if think else ""}]
        for q, answers, t in r.sample(questions(s, plot), r.choice([0, 0, 1, 1, 2, 3])):
            messages += [{"role": "user", "content": q}, {"role": "assistant", "content": r.choice(answers), "reasoning_content": t if think else ""}]
    return {"messages": messages}


if __name__ == "__main__":
    rng = random.Random(3)
    for p in PLOTS:
        s_, _, text_ = story(rng, plot=p)
        print(ask(rng, s_, p), "\n", text_, "\n")
